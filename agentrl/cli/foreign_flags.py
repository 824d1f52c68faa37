"""Flags of other programs: Megatron's by their own names, SGLang's as `--sglang-NAME`, and slime's that are refused with advice."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError, suggest

REFUSED = {
    "actor-num-nodes": "training runs on one machine; give --actor-num-gpus-per-node",
    "load": "to continue a run give --resume RUN; to start from other weights give --hf-checkpoint DIR",
    "save": "checkpoints are in the run folder; give --run DIR",
    "micro-batch-size": "micro-batches are packed by tokens; give --max-tokens-per-gpu",
    "normalize-advantages": "advantages are normalised in the group (--advantage-estimator grpo) or not (dr_grpo)",
    "true-on-policy-mode": "with --num-steps-per-rollout 1 the ratio is 1 by definition",
    "over-sampling-batch-size": "over-sampling is not supported; flat groups are counted as flat_groups",
    "partial-rollout": "partial rollouts are not supported; every rollout is finished",
    "async-buffer-size": "training is synchronous",
    "update-weights-interval": "weights are updated after every rollout",
    "custom-generate-function-path": "write an Env and give --env file.py:Class",
    "custom-rm-path": "write a function with @reward and give --reward file.py:function",
    "group-rm": "mark the reward itself: @reward(group=True)",
    "rm-type": "name a reward, such as --reward em",
    "use-fault-tolerance": "failed episodes are retried (--max-retries), and a stopped run continues with --resume",
    "streaming-data": "data files are read whole",
    "num-data-workers": "data files are read whole",
    "debug-rollout-only": "use `agentrl rollout`",
    "debug-train-only": "use `agentrl train --train-only RUN`",
    "save-debug-rollout-data": "every episode is recorded in the run folder",
    "load-debug-rollout-data": "use `agentrl train --train-only RUN`",
}
"""slime's flags that are not accepted, and what to do instead."""


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


def read_megatron(words: Sequence[str], ours: Iterable[str]) -> dict[str, Any]:
    """Megatron's settings by field name, from words that are not flags of agentrl; `ours` are suggested for misspelled flags.

    Raises:
        ConfigError: A flag is unknown or refused, or has no value.
    """
    settings: dict[str, Any] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected {word!r}; flags begin with --")
        name, _, attached = word[2:].partition("=")
        if name in REFUSED:
            raise ConfigError(f"--{name} is not accepted: {REFUSED[name]}")
        specs = _megatron_flags()
        if name not in specs:
            raise unknown_flag(name, [*specs, *ours, *REFUSED])
        field, value = specs[name].parse([attached] if attached else _take_values(words))
        settings[field] = value
    return settings


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


def unknown_flag(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a flag that does not exist, with similar flags if there are any."""
    similar = suggest(name, known)
    advice = similar if "did you mean" in similar else "; `agentrl train --help-all` lists all flags"
    return ConfigError(f"unknown flag --{name}{advice}")


def parse_value(text: str) -> Any:
    """The value of a word as TOML reads it, also True and False; other words are text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def _take_values(words: list[str], at_most: int | None = None) -> list[str]:
    taken: list[str] = []
    while words and not words[0].startswith("--") and len(taken) != at_most:
        taken.append(words.pop(0))
    return taken


def _megatron_flags() -> Mapping[str, Any]:
    from agentrl.train.megatron.megatron_flags import megatron_flags  # reads megatron-core's source

    return megatron_flags()
