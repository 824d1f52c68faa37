"""The type and the bounds of a setting in words, for error messages and help."""

from __future__ import annotations

import typing
from typing import Any, Literal

from pydantic.fields import FieldInfo

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_TYPES = {int: "an integer", float: "a number", str: "text", bool: "true or false", dict: "a table", tuple: "a list"}


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
