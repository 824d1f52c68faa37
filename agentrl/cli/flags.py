"""Command-line flags in three families: our own, one for each field of config/settings.py; Megatron's, by their own names; and slime's.

Those of slime that mean something else here, or do not exist yet, are refused by name with what to use instead.
"""

from __future__ import annotations

import argparse
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from agentrl.config import FIELDS, SECTIONS, Layer
from agentrl.errors import ConfigError, suggest

ALIASES = {"model": "hf_checkpoint", "recompute_activations": "recompute_granularity"}
"""flags known under another name too"""

REFUSED = {
    "actor-num-nodes": "one machine for now: give --actor-num-gpus-per-node",
    "load": "go on with a run: --resume RUN; begin from other weights: --hf-checkpoint DIR",
    "save": "checkpoints go into the run folder: --run DIR",
    "micro-batch-size": "micro-batches are packed by tokens: --max-tokens-per-gpu",
    "normalize-advantages": "advantages are normalised in the group: --advantage-estimator grpo (dr_grpo: not)",
    "true-on-policy-mode": "with --num-steps-per-rollout 1 the ratio is 1 by definition",
    "over-sampling-batch-size": "no over-sampling yet; flat groups are counted as flat_groups",
    "partial-rollout": "no partial rollout yet; every rollout is finished",
    "async-buffer-size": "training is synchronous",
    "update-weights-interval": "weights are updated after every rollout",
    "custom-generate-function-path": "write an Env: --env file.py:Class",
    "custom-rm-path": "write a @reward: --reward file.py:function",
    "group-rm": "mark the reward itself: @reward(group=True)",
    "rm-type": "name a reward: --reward em",
    "use-fault-tolerance": "failed episodes are always retried (--max-retries) and a run that died resumes (--resume)",
    "streaming-data": "data files are read whole",
    "num-data-workers": "data files are read whole",
    "debug-rollout-only": "use `agentrl rollout`",
    "debug-train-only": "use `agentrl train --train-only RUN`",
    "save-debug-rollout-data": "every episode is recorded in the run folder",
    "load-debug-rollout-data": "use `agentrl train --train-only RUN`",
}
"""slime's flags that are not taken, and what to use"""


_hints = functools.cache(typing.get_type_hints)
"""of a section, once: every command has all sections"""
_TRUTH = frozenset("true false yes no on off t f y n 1 0".split())


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field, its docstring as help."""
    parser.set_defaults(takes_settings=True)
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").splitlines()[0])
        hints = _hints(cls)
        docs = field_docs(cls)
        for f in fields(cls):
            kind = hints[f.name]
            options: dict[str, Any] = {
                "dest": f.name,
                "default": argparse.SUPPRESS,
                "help": _help(docs.get(f.name, ""), f),
            }
            if kind is bool:
                options |= {"nargs": "?", "const": True, "metavar": "true|false"}
            elif typing.get_origin(kind) is tuple:
                options |= {"nargs": "+", "metavar": "X"}
            elif typing.get_origin(kind) is dict:
                options |= {"action": "append", "metavar": "NAME=VALUE"}
            else:
                options |= {"metavar": "X"}
            name = f.name.removesuffix("s") if typing.get_origin(kind) is dict else f.name
            names = [_flag(name), *(_flag(a) for a, target in ALIASES.items() if target == f.name)]
            group.add_argument(*names, **options)


def with_truth(words: Sequence[str]) -> list[str]:
    """The words, each flag that is true or false with its value: argparse would take any word after it for that."""
    out = list(words)
    for i, word in enumerate(out):
        if word in _yes_or_no() and not (i + 1 < len(out) and out[i + 1].lower() in _TRUTH):
            out[i] = f"{word}=true"
    return out


@functools.cache
def _yes_or_no() -> frozenset[str]:
    return frozenset(_flag(name) for cls in SECTIONS.values() for name, kind in _hints(cls).items() if kind is bool)


def read_flags(namespace: argparse.Namespace, rest: Sequence[str]) -> Layer:
    """The layer of what was given: own flags from the namespace, Megatron's from the rest.

    Raises:
        ConfigError: an unknown or refused flag, a flag without its value.
    """
    layer: Layer = {k: v for k, v in vars(namespace).items() if k in FIELDS}
    for name in ("env_args", "template_args"):
        if name in layer:
            layer[name] = dict(_pair(name, item) for item in layer[name])
    theirs, rest = split_sglang(rest)
    if theirs:
        layer["sglang"] = theirs
    if rest:
        layer["megatron"] = read_megatron(rest)
    return layer


def split_sglang(rest: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """SGLang's flags by name, and the words that are left. Names are checked against the SGLang that will run (engine/sglang/server_flags.py)."""
    out: dict[str, Any] = {}
    left: list[str] = []
    words = list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--sglang-"):
            left.append(word)
            continue
        name, eq, attached = word.removeprefix("--sglang-").partition("=")
        values = [attached] if eq else _take_values(words)
        parsed = [parse_value(v) for v in values]
        out[name.replace("-", "_")] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return out, left


def read_megatron(rest: Sequence[str]) -> dict[str, Any]:
    """Megatron's flags among words that no own flag took.

    Raises:
        ConfigError: unknown, refused, or without its value.
    """
    out: dict[str, Any] = {}
    words = list(rest)
    specs: Mapping[str, Any] | None = None
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected word {word!r}; flags begin with --")
        name, _, attached = word[2:].partition("=")
        if name in REFUSED:
            raise ConfigError(f"--{name} is not taken: {REFUSED[name]}")
        if specs is None:
            from agentrl.train.megatron.megatron_flags import megatron_flags

            specs = megatron_flags()
        if name not in specs:
            known = [*specs, *(_flag(f)[2:] for f in FIELDS), *REFUSED]
            raise ConfigError(f"unknown flag --{name}{suggest(name, known)}")
        values = [attached] if attached else _take_values(words)
        field, value = specs[name].parse(values)
        out[field] = value
    return out


def split_unknown(words: Sequence[str], unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its `unknown` flags and the values that Megatron's take, and these: argparse would take such values for other words."""
    from agentrl.train.megatron.megatron_flags import megatron_flags

    left: list[str] = []
    theirs: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word not in unknown:
            left.append(word)
            continue
        theirs.append(word)
        spec = megatron_flags().get(word[2:])
        if spec is not None and spec.fixed is None:
            theirs += _take_values(words, None if spec.many else 1)
    return left, theirs


def _take_values(words: list[str], most: int | None = None) -> list[str]:
    taken: list[str] = []
    while words and not words[0].startswith("--") and len(taken) != most:
        taken.append(words.pop(0))
    return taken


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, from its source."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[item.target.id] = str(after.value.value)
    return docs


def _help(doc: str, f: Any) -> str:
    default = (
        ""
        if f.default in (None, ()) or not isinstance(f.default, (str, int, float, bool))
        else f" (default {f.default})"
    )
    return (doc + default).replace("%", "%%") or "see the documentation"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _pair(name: str, item: str) -> tuple[str, Any]:
    key, eq, raw = item.partition("=")
    if not eq:
        raise ConfigError(f"{_flag(name.removesuffix('s'))} takes NAME=VALUE, found {item!r}")
    return key, parse_value(raw)


def parse_value(raw: str) -> Any:
    """A word of the command line as TOML would read it, True and False too; what is no TOML value is a string."""
    import tomllib

    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(raw, raw)
