"""A setting in words, for error messages and help: its flag, type, bounds and default."""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

from pydantic.fields import FieldInfo

from agentrl.config.settings import FIELDS, SECTIONS, field_infos

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_TYPES = {int: "an integer", float: "a number", str: "text", bool: "true or false", dict: "a table", tuple: "a list"}

ALIASES = {"model": "hf_checkpoint"}
"""Further names of flags, and the settings they set."""


def flag_names(name: str) -> list[str]:
    """The flags of a setting. The flag of a table takes one entry of it, so it is named in the singular."""
    is_table = plain_type(setting(name).annotation) is dict
    aliases = [alias for alias, target in ALIASES.items() if target == name]
    return ["--" + n.replace("_", "-") for n in [name.removesuffix("s") if is_table else name, *aliases]]


def setting(name: str) -> FieldInfo:
    """Type, bounds, default and help text of a setting."""
    return field_infos(SECTIONS[FIELDS[name]])[name]


def default_text(info: FieldInfo) -> str:
    """The default as one would write it; in words where the help text explains it."""
    explained = re.search(r"\(default: (.*)\)", (info.description or "").split("\n\n")[0])
    if explained:
        return explained[1]
    return str(info.default).lower() if isinstance(info.default, bool) else str(info.default)


def describe_type(annotation: Any) -> str:
    """The type in words: "an integer", "one of k1, k2, k3", "a number or none"."""
    words = f"one of {', '.join(choices(annotation))}" if choices(annotation) else _TYPES[plain_type(annotation)]
    return f"{words} or none" if is_optional(annotation) else words


def describe_bounds(info: FieldInfo) -> str:
    """The bounds in words: "at least 0 and at most 1"; empty without bounds."""
    bounds = [(word, getattr(m, key)) for m in info.metadata for key, word in _BOUNDS.items() if hasattr(m, key)]
    return " and ".join(f"{word} {'2**63' if bound == 2**63 else bound}" for word, bound in bounds)


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal; empty for other types."""
    return next((typing.get_args(a) for a in _alternatives(annotation) if typing.get_origin(a) is Literal), ())


def plain_type(annotation: Any) -> type:
    """int, float, str, bool, tuple or dict: the type without None and without parameters."""
    first = _alternatives(annotation)[0]
    return str if choices(annotation) else typing.get_origin(first) or first


def is_optional(annotation: Any) -> bool:
    """Whether the setting may be None."""
    return type(None) in typing.get_args(annotation)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if is_optional(annotation) else (annotation,)
