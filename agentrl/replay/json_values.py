"""Comparison of two values of an episode as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from agentrl.core.sequences import first_difference
from agentrl.store import encode

_CHARS_BEFORE, _CHARS_SHOWN = 20, 200


def same(a: Any, b: Any) -> bool:
    """True if the values are equal as JSON: a tuple equals a list, a numpy number a number."""
    return bool(a == b) or _json(a) == _json(b)


def first_unequal_part(a: Any, b: Any) -> tuple[Any, Any]:
    """The first parts, as deep as possible, in which two unequal values differ."""
    a, b = _json(a), _json(b)
    while True:
        if isinstance(a, dict) and isinstance(b, dict):
            key = next((k for k in dict.fromkeys((*a, *b)) if k not in a or k not in b or a[k] != b[k]), None)
        elif isinstance(a, list) and isinstance(b, list):
            index = first_difference(a, b)
            key = index if index < max(len(a), len(b)) else None
        else:
            return a, b
        if key is None:
            return a, b
        a, b = _get(a, key), _get(b, key)


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def excerpts(a: Any, b: Any) -> tuple[Any, Any]:
    """Return excerpts of two texts around their first difference. Other values are returned unchanged."""
    if isinstance(a, str) and isinstance(b, str):
        start = max(0, first_difference(a, b) - _CHARS_BEFORE)
        return a[start : start + _CHARS_SHOWN], b[start : start + _CHARS_SHOWN]
    return a, b


def differ_only_in_length(a: list[Any], b: list[Any]) -> bool:
    """True if the contents of two lists of messages are equal except for where they were cut."""
    if len(a) != len(b):
        return False
    contents = [(str(x.get("content")), str(y.get("content"))) for x, y in zip(a, b, strict=True)]
    return all(x.startswith(y) or y.startswith(x) for x, y in contents)


def as_text(value: Any) -> str:
    """A value as a report shows it."""
    return value if isinstance(value, str) else json.dumps(_json(value), ensure_ascii=False)


def _json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        value = [_plain(v) for v in value]
    return json.loads(encode({"v": _plain(value)}))["v"]


def _plain(value: Any) -> Any:
    names = getattr(type(value), "__slots__", ()) if hasattr(type(value), "__dataclass_fields__") else ()
    return {n: getattr(value, n) for n in names} if names else value


def _get(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError):
        return None
