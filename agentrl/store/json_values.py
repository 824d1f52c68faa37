"""The last resort for values that JSON cannot express: each costs itself, never the record that holds it.

Users put anything into `info` and `state`: dictionaries with tuples as keys, cycles, objects whose repr raises, nesting without end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

MAX_DEPTH = 500
"""Levels of nesting that are written; Python reads no more than twice as many."""


def plain(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a value as JSON values. `convert` turns one that is not JSON into a simpler one; what it cannot convert becomes a remark.

    Integers of any size stay. NaN and infinity become None, as orjson writes them. Keys become strings.
    """
    return _plain(value, convert, MAX_DEPTH, set())


def _plain(value: Any, convert: Callable[[Any], Any], depth: int, parents: set[int]) -> Any:
    """One frame per level, so that the interpreter's limit is not reached before `depth`. `parents`: ids of the values around this one."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if id(value) in parents:
        return f"<{kind.__name__} that contains itself>"
    if depth == 0:
        return f"<{kind.__name__} nested more than {MAX_DEPTH} deep>"
    parents.add(id(value))
    try:
        if isinstance(value, Mapping):
            pairs = {}
            for k, v in value.items():
                pairs[_key(k)] = _plain(v, convert, depth - 1, parents)
            return pairs
        if isinstance(value, (list, tuple)):
            items = []
            for v in value:
                items.append(_plain(v, convert, depth - 1, parents))  # noqa: PERF401  a comprehension is a frame more
            return items
        return _plain(_simpler(value, convert), convert, depth - 1, parents)
    except Exception as e:  # noqa: BLE001  the value's own code raised: its iteration, its repr or its conversion
        return f"<{kind.__name__} that cannot be recorded: {type(e).__name__}>"
    finally:
        parents.discard(id(value))


def _simpler(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Enum):
        return value.value
    for scalar in (int, str, float):  # their subclasses
        if isinstance(value, scalar):
            return scalar(value)
    return convert(value)


def _key(key: Any) -> str:
    """Return a key as text, as orjson writes it where orjson can."""
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    try:
        return repr(key)
    except Exception as e:  # noqa: BLE001  the key's own repr raised
        return f"<{type(key).__name__} that cannot be recorded: {type(e).__name__}>"
