"""What to do with the flags of slime, TRL, verl and Megatron-LM's scripts. `flag_advice.toml` holds the tables."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import FIELDS
from agentrl.config.describe import flag_names


@dataclass(frozen=True)
class FlagTables:
    """The contents of `flag_advice.toml`. Flags are named without the dashes before them."""

    same: dict[str, str]
    """accepted flags, and the flag of agentrl or Megatron that each stands for"""
    words: dict[str, list[str]]
    """accepted flags without a value, and the words of a command line that each stands for"""
    environment: dict[str, str]
    """accepted flags of services, and the environment variable that takes the value of each"""
    refused: dict[str, str]
    """flags that are not accepted, and what to do instead"""
    prefixes: dict[str, str]
    """beginnings of flags that are not accepted, and what to do instead"""
    without_effect: dict[str, str]
    """accepted flags, or NAME=VALUE, that ask for what is always done, and why they have no effect"""
    values: dict[tuple[str, str], str]
    """(setting, value) of other programs, and what to give instead"""


@functools.cache
def flag_tables() -> FlagTables:
    """Read the tables; done only when a flag is not one of agentrl's settings."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    answers, without_effect = (
        {name: text for text, names in data[table].items() for name in names} for table in ("refused", "without_effect")
    )
    prefixes = {name[:-1]: text for name, text in answers.items() if name.endswith("*")}
    refused = {name: text for name, text in answers.items() if not name.endswith("*")}
    values = {
        (setting, value): text for setting, texts in data["values"].items() for text in texts for value in texts[text]
    }
    return FlagTables(data["same"], data["words"], data["environment"], refused, prefixes, without_effect, values)


def our_name(name: str) -> str:
    """The name of the flag that this one stands for; the name itself if it stands for no other."""
    return flag_tables().same.get(name, name)


def why_without_effect(name: str, values: Sequence[str]) -> str | None:
    """Why a flag with these values is accepted and has no effect; None: it is not such a flag."""
    table = flag_tables().without_effect
    return table.get(name) or table.get(f"{name}={' '.join(values)}")


@functools.cache
def _own_flags() -> frozenset[str]:
    """The flags of the settings, which differ from their names for tables and aliases."""
    return frozenset(flag for name in FIELDS for flag in flag_names(name))


def advice(name: str) -> str | None:
    """What to do instead of a flag that is not accepted, named without dashes before it; None: the flag is not in the tables."""
    if name.replace("-", "_") in FIELDS or f"--{name}" in _own_flags():
        return None
    tables = flag_tables()
    if name in tables.same or name in tables.words or name in tables.environment:
        return None
    longest = max((prefix for prefix in tables.prefixes if name.startswith(prefix)), key=len, default=None)
    return tables.refused.get(name) or (tables.prefixes[longest] if longest else None)


def verl_advice(word: str, accepted: Container[str]) -> str | None:
    """What to give instead of a key of verl, such as actor_rollout_ref.rollout.n=8; None: the word is not such a key.

    The last words of a key say what it means. `accepted` are the names of flags that agentrl takes.
    """
    key, equals, _ = word.lstrip("+").partition("=")
    parts = key.split(".")
    if not equals or len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    for count in (3, 2, 1):
        name = "-".join(parts[-count:]).replace("_", "-")
        if our_name(name) != name or name in accepted:
            return f"give --{our_name(name)}"
        if text := advice(name):
            return text
    return "`agentrl train --help-all` lists all flags"
