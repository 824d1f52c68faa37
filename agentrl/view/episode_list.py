"""The list of episodes, filtered and sorted over the index.

A query has the filters q (words), split, stop, status, step, group, least and most (score), replay ('identical', a cause, 'differs'); and
sort (a column, 'advantage' or 'rewards.NAME') with desc=1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from agentrl.errors import StoreError
from agentrl.store import IndexEntry

FILTERS = ("q", "split", "stop", "status", "step", "group", "least", "most", "replay")
NUMBERS = ("group", "index", "attempt", "step", "score", "turns", "sampled", "tokens", "version", "seconds", "invalid")
COLUMNS = (*NUMBERS, "id", "split", "stop", "status", "cause", "rewards", "task", "text", "answer")
Test = Callable[[IndexEntry], bool]


def select(
    entries: Sequence[IndexEntry],
    query: Mapping[str, str],
    replayed: Mapping[str, str],
    advantages: Mapping[str, float],
) -> list[IndexEntry]:
    """The entries that pass all filters, in the order asked for.

    Raises:
        StoreError: a number that is none, an unknown column.
    """
    tests = _tests(query, replayed)
    found = [e for e in entries if all(t(e) for t in tests)] if tests else list(entries)
    column, desc = query.get("sort", ""), query.get("desc") == "1"
    if not column:
        return found[::-1] if desc else found
    return sorted(found, key=_key(column, advantages), reverse=desc)


def _tests(query: Mapping[str, str], replayed: Mapping[str, str]) -> list[Test]:
    tests = [_equals(name, query[name]) for name in ("split", "stop", "status") if query.get(name)]
    tests += [_equals(name, whole_number(query, name, 0)) for name in ("step", "group") if query.get(name)]
    if query.get("least"):
        least = _number(query, "least")
        tests.append(lambda e: e.score >= least)
    if query.get("most"):
        most = _number(query, "most")
        tests.append(lambda e: e.score <= most)
    words = query.get("q", "").casefold().split()
    if words:
        tests.append(lambda e: all(w in _haystack(e) for w in words))
    said = query.get("replay")
    if said == "differs":
        tests.append(lambda e: replayed.get(e.id, "identical") != "identical")
    elif said:
        tests.append(lambda e: replayed.get(e.id) == said)
    return tests


def _equals(name: str, wanted: Any) -> Test:
    value = attrgetter(name)
    return lambda e: bool(value(e) == wanted)


def _haystack(e: IndexEntry) -> str:
    return f"{e.id} {e.task} {e.text} {e.answer or ''} {e.cause or ''}".casefold()


def _key(column: str, advantages: Mapping[str, float]) -> Callable[[IndexEntry], Any]:
    if column == "advantage":
        return lambda e: advantages.get(e.id, 0.0)
    if column.startswith("rewards."):
        name = column.removeprefix("rewards.")
        return lambda e: e.rewards.get(name) or 0.0
    if column not in COLUMNS or column == "rewards":
        raise StoreError(f"the list cannot be sorted by {column[:40]!r}")
    value = attrgetter(column)
    if column in NUMBERS:
        return lambda e: value(e) or 0
    return lambda e: str(value(e) or "")


def whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    """A number from 0 up.

    Raises:
        StoreError: it is none.
    """
    value = query.get(name, "")
    if value and not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise StoreError(f"{name} must be a number from 0 up, found {value[:40]!r}")
    return int(value) if value else default


def _number(query: Mapping[str, str], name: str) -> float:
    try:
        return float(query[name])
    except ValueError:
        raise StoreError(f"{name} must be a number, found {query[name][:40]!r}") from None
