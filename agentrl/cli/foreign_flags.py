"""Flags of other programs: Megatron's by their own names, SGLang's as `--sglang-NAME`, and those that `flag_advice` renames or refuses."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.cli.flag_advice import advice, flag_tables, our_name, verl_advice, why_without_effect
from agentrl.config import FIELDS
from agentrl.core.redaction import remember
from agentrl.errors import ConfigError, suggest

logger = logging.getLogger(__name__)


def own_names(words: Sequence[str]) -> list[str]:
    """A command line in which flags have our names: `--num_generations=8` becomes `--n-samples-per-prompt=8`."""
    return [own for word in words for own in (_own_words(word) if word.startswith("--") else [word])]


def _own_words(word: str) -> list[str]:
    name, equals, value = word[2:].partition("=")
    if name.replace("-", "_") not in FIELDS:
        name = name.replace("_", "-")
        if not equals and (words := flag_tables().words.get(name)):
            return words
        name = our_name(name)
    return [f"--{name.replace('_', '-')}{equals}{value}"]


def split_sglang(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """SGLang's flags by name, and the other words.

    engine/sglang/server_flags.py checks the names against the SGLang that will run.
    """
    flags: dict[str, Any] = {}
    others: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--sglang-"):
            others.append(word)
            continue
        name, equals, attached = word.removeprefix("--sglang-").partition("=")
        values = [parse_value(v) for v in ([attached] if equals else _take_values(words))]
        flags[name.replace("-", "_")] = True if not values else values[0] if len(values) == 1 else values
    return flags, others


def read_megatron(words: Sequence[str], ours: Iterable[str], problems: list[str]) -> dict[str, Any]:
    """Megatron's settings by field name, from words that are not flags of agentrl.

    Args:
        words: the command line without agentrl's own flags.
        ours: names of agentrl's flags, suggested for misspelled ones.
        problems: flags that are unknown or refused, or lack a value, are appended, one sentence for each.
    """
    settings: dict[str, Any] = {}
    unneeded: dict[str, list[str]] = {}
    words, ours = list(words), list(ours)
    while words:
        word, *words = words
        name, equals, attached = word.removeprefix("--").partition("=")
        values = [attached] if equals else _take_values(words) if word.startswith("--") else []
        if word.startswith("--") and (why := why_without_effect(name, values)):
            unneeded.setdefault(why, []).append(f"--{name}")
            continue
        if word.startswith("--") and (variable := flag_tables().environment.get(name)):
            problems += _set_variable(name, variable, values)
            continue
        try:
            field, value = _read_flag(word, values, ours)
        except ConfigError as e:
            problems.append(str(e))
        else:
            settings[field] = value
    for why, flags in unneeded.items():
        logger.warning("%s: without effect, since %s", ", ".join(flags), why)
    return settings


def _set_variable(name: str, variable: str, values: Sequence[str]) -> list[str]:
    """Set the environment variable that a flag of a service stands for; the problem, if there is one."""
    if len(values) != 1 or not values[0]:
        return [f"--{name} takes one value, as {variable} does, found {len(values)}"]
    if "KEY" in variable:
        remember(values[0])
    os.environ[variable] = values[0]
    return []


def _read_flag(word: str, values: Sequence[str], ours: Sequence[str]) -> tuple[str, Any]:
    """The field of Megatron that a flag sets, and its value.

    Raises:
        ConfigError: the flag is unknown or refused, or its value does not fit.
    """
    if not word.startswith("--"):
        specs = _megatron_flags() if "=" in word else {}
        if instead := verl_advice(word, [*ours, *specs]):
            raise ConfigError(f"{word}: agentrl has flags, not verl's keys; {instead}")
        raise ConfigError(f"unexpected {word!r}; flags begin with --")
    name = word[2:].partition("=")[0]
    if instead := advice(name):
        raise ConfigError(f"--{name} is not accepted: {instead}")
    specs = _megatron_flags()
    if name not in specs:
        tables = flag_tables()
        raise not_a_flag(name, [*specs, *ours, *tables.refused, *tables.same, *tables.words, *tables.environment])
    field, value = specs[name].parse(values)
    return field, value


def split_unknown(words: Sequence[str], unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its `unknown` flags and the values that Megatron's flags take, and these separately.

    Without this, argparse would take the values of Megatron's flags as positional arguments.
    """
    known: list[str] = []
    foreign: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word not in unknown:
            known.append(word)
            continue
        foreign.append(word)
        spec = _megatron_flags().get(word[2:])
        if spec is not None and spec.fixed is None:
            foreign += _take_values(words, None if spec.many else 1)
    return known, foreign


def not_a_flag(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a setting of Megatron that cannot be set, or for a flag that does not exist, with similar flags if there are any."""
    from agentrl.train.megatron.megatron_flags import why_not_settable

    if reason := why_not_settable(name):
        return ConfigError(f"--{name} cannot be set: {reason}")
    similar = suggest(name, known)
    advice = similar if "did you mean" in similar else "; `agentrl train --help-all` lists all flags"
    return ConfigError(f"unknown flag --{name}{advice}")


def parse_value(text: str) -> Any:
    """The value of a word as TOML reads it, also True and False; other words are text.

    Raises:
        ConfigError: it is an integer of thousands of digits, or is nested too deep.
    """
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)
    except (ValueError, RecursionError) as e:
        what = "is nested too deep" if isinstance(e, RecursionError) else "is an integer of too many digits"
        raise ConfigError(f"the value {text:.40}… {what}; write text in quotes: '\"…\"'") from e


def _take_values(words: list[str], at_most: int | None = None) -> list[str]:
    taken: list[str] = []
    while words and not words[0].startswith("--") and len(taken) != at_most:
        taken.append(words.pop(0))
    return taken


def _megatron_flags() -> Mapping[str, Any]:
    from agentrl.train.megatron.megatron_flags import megatron_flags  # reads megatron-core's source

    return megatron_flags()
