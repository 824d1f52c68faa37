"""Two values of an episode side by side: are they the same, and where do they first differ?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.store import encode


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: a tuple is a list, a numpy number a number."""
    return bool(a == b) or _json(a) == _json(b)


def first_unlike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index at which two sequences differ; the shorter one's length if one begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        value = [_plain(v) for v in value]
    return json.loads(encode({"v": _plain(value)}))["v"]


def _plain(value: Any) -> Any:
    names = getattr(type(value), "__slots__", ()) if hasattr(type(value), "__dataclass_fields__") else ()
    return {n: getattr(value, n) for n in names} if names else value


def first_unlike_part(a: Any, b: Any) -> tuple[Any, Any]:
    """Two unlike values taken apart down to the first part that differs."""
    a, b = _json(a), _json(b)
    while True:
        if isinstance(a, dict) and isinstance(b, dict):
            key = next((k for k in dict.fromkeys((*a, *b)) if k not in a or k not in b or a[k] != b[k]), None)
        elif isinstance(a, list) and isinstance(b, list):
            at = first_unlike(a, b)
            key = at if at < max(len(a), len(b)) else None
        else:
            return a, b
        if key is None:
            return a, b
        a, b = _get(a, key), _get(b, key)


def _get(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError):
        return None


def strings(value: Any) -> Iterator[str]:
    """All strings in JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def tails(a: Any, b: Any) -> tuple[Any, Any]:
    """Of two texts what follows a little before they differ."""
    if isinstance(a, str) and isinstance(b, str):
        at = max(0, first_unlike(a, b) - 20)
        return a[at : at + 200], b[at : at + 200]
    return a, b


def one_begins_the_other(a: list[Any], b: list[Any]) -> bool:
    """Cut at other places, contents otherwise equal."""
    if len(a) != len(b):
        return False
    contents = [(str(x.get("content")), str(y.get("content"))) for x, y in zip(a, b, strict=True)]
    return all(x.startswith(y) or y.startswith(x) for x, y in contents)


def as_text(value: Any) -> str:
    """A value as a report shows it."""
    return value if isinstance(value, str) else json.dumps(_json(value), ensure_ascii=False)
