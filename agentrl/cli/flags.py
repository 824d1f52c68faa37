"""One flag for each setting of config/settings/. Flags of Megatron, SGLang and slime are read in foreign_flags.py."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Container, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from agentrl.cli.flag_advice import flag_tables
from agentrl.cli.foreign_flags import parse_value, read_megatron, split_sglang
from agentrl.config import FIELDS, SECTIONS, Layer
from agentrl.config.describe import choices, default_text, flag_names, plain_type, setting
from agentrl.config.load import value_problems
from agentrl.config.settings import field_infos
from agentrl.errors import ConfigError
from agentrl.run.resolve import Given

BASIC = frozenset(
    "hf_checkpoint env env_args reward prompt_data num_rollout rollout_batch_size n_samples_per_prompt max_turns "
    "rollout_max_response_len rollout_max_context_len concurrency engine rollout_num_gpus advantage_estimator lr "
    "actor_num_gpus_per_node eval_interval run seed".split()
)
"""The twenty settings that `--help` shows; `--help-all` shows all."""

_BOOLEAN_WORDS = frozenset("true false yes no on off t f y n 1 0".split())


def add_flags(parser: argparse.ArgumentParser, names: Container[str] = FIELDS, *, several_envs: bool = False) -> None:
    """Add a flag for each of these settings, grouped by section. `several_envs`: --env takes several words."""
    parser.set_defaults(takes_settings=True)
    for section, cls in SECTIONS.items():
        infos = {name: info for name, info in field_infos(cls).items() if name in names}
        if not infos:
            continue
        group = parser.add_argument_group(f"[{section}] {(cls.__doc__ or '').rstrip('.')}")
        for name, info in infos.items():
            options: dict[str, Any] = {
                "dest": name,
                "default": argparse.SUPPRESS,
                "metavar": metavar(info),
                "help": summary(info).replace("%", "%%"),
            }
            kind = plain_type(info.annotation)
            if kind is bool:
                options |= {"nargs": "?", "const": True}
            elif kind is tuple:
                options |= {"nargs": "+"}
            elif name == "env" and several_envs:
                options |= {"nargs": "+", "metavar": (metavar(info), "…")}
            elif kind is dict:
                options |= {"action": "append"}
            group.add_argument(*flag_names(name), **options)


def metavar(info: FieldInfo) -> str | tuple[str, ...]:
    """What stands for the value in the help: N, F, PATH, {k1,k2,k3}."""
    if allowed := choices(info.annotation):
        return f"{{{','.join(allowed)}}}"
    named = next((m for m in info.metadata if isinstance(m, str)), "")
    words = named or {int: "N", float: "F", bool: "true|false"}[plain_type(info.annotation)]
    return tuple(words.split()) if " " in words else words


def summary(info: FieldInfo) -> str:
    """The first paragraph of the help text, with the default."""
    text = (info.description or "").split("\n\n")[0]
    return text if "(default: " in text else f"{text} (default: {default_text(info)})"


def complete_switches(words: Sequence[str]) -> list[str]:
    """Give each bare true-or-false flag its value: `--colocate RUN` becomes `--colocate=true RUN`.

    Without this, argparse would take any word after such a flag as its value.
    """
    completed = list(words)
    for i, word in enumerate(completed):
        if word in _switches() and not (i + 1 < len(completed) and completed[i + 1].lower() in _BOOLEAN_WORDS):
            completed[i] = f"{word}=true"
    return completed


@functools.cache
def _switches() -> frozenset[str]:
    return frozenset(flag for n in FIELDS if plain_type(setting(n).annotation) is bool for flag in flag_names(n))


def read_flags(namespace: argparse.Namespace, rest: Sequence[str]) -> Layer:
    """The settings given on the command line: ours from the namespace, SGLang's and Megatron's from the rest.

    Raises:
        ConfigError: Flags are unknown or refused, lack a value, or their values cannot be used; the message names all of them.
    """
    layer: Layer = {name: value for name, value in vars(namespace).items() if name in FIELDS}
    problems: list[str] = []
    if isinstance(layer.get("env"), list):
        layer["env"] = " ".join(layer["env"])
    for name in list(layer):
        if plain_type(setting(name).annotation) is dict:
            layer[name] = dict(_pair(name, item) for item in layer[name])
            continue
        given = layer[name] if isinstance(layer[name], list) else [layer[name]]
        foreign = [(v, text) for v in given if (text := flag_tables().values.get((name, str(v))))]
        problems += [f"{flag_names(name)[0]} {value} is not accepted: {instead}" for value, instead in foreign]
        problems += [] if foreign else value_problems({name: layer[name]})
    sglang, rest = split_sglang(rest)
    if sglang:
        layer["sglang"] = sglang
    if rest:
        layer["megatron"] = read_megatron(rest, [flag[2:] for name in FIELDS for flag in flag_names(name)], problems)
    if problems:
        raise ConfigError.of_all(problems)
    return layer


def read_given(args: argparse.Namespace, rest: Sequence[str]) -> Given:
    """What a command is given: its flags, and the file of --config."""
    return Given(command=args.command, flags=read_flags(args, rest), config=args.config)


def _pair(name: str, item: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals:
        raise ConfigError(f"{flag_names(name)[0]} takes NAME=VALUE, found {item!r}")
    return key, parse_value(value)
