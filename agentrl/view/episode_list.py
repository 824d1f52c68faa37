"""The list of episodes, filtered and sorted over the index.

The keys of a query: the filters q (words), split, stop, status, step, group, least and most (score) and replay ('identical', a cause, or
'differs'); sort (a column, 'advantage' or 'rewards.NAME'); desc=1 for descending order.
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
Predicate = Callable[[IndexEntry], bool]


def select(
    entries: Sequence[IndexEntry],
    query: Mapping[str, str],
    replayed: Mapping[str, str],
    advantages: Mapping[str, float],
) -> list[IndexEntry]:
    """Return the entries that pass all filters, sorted as the query says. `replayed` holds the result of the last replay by episode id.

    Raises:
        StoreError: the query holds an invalid number or an unknown column.
    """
    predicates = _predicates(query, replayed)
    selected = [e for e in entries if all(p(e) for p in predicates)] if predicates else list(entries)
    column, descending = query.get("sort", ""), query.get("desc") == "1"
    if not column:
        return selected[::-1] if descending else selected
    return sorted(selected, key=_sort_key(column, advantages), reverse=descending)


def _predicates(query: Mapping[str, str], replayed: Mapping[str, str]) -> list[Predicate]:
    predicates = [_equals(name, query[name]) for name in ("split", "stop", "status") if query.get(name)]
    predicates += [_equals(name, whole_number(query, name, 0)) for name in ("step", "group") if query.get(name)]
    if query.get("least"):
        least = _number(query, "least")
        predicates.append(lambda e: e.score >= least)
    if query.get("most"):
        most = _number(query, "most")
        predicates.append(lambda e: e.score <= most)
    words = query.get("q", "").casefold().split()
    if words:
        predicates.append(lambda e: all(word in _searchable(e) for word in words))
    replay = query.get("replay")
    if replay == "differs":
        predicates.append(lambda e: replayed.get(e.id, "identical") != "identical")
    elif replay:
        predicates.append(lambda e: replayed.get(e.id) == replay)
    return predicates


def _equals(name: str, wanted: Any) -> Predicate:
    value = attrgetter(name)
    return lambda e: bool(value(e) == wanted)


def _searchable(e: IndexEntry) -> str:
    return f"{e.id} {e.task} {e.text} {e.answer or ''} {e.cause or ''}".casefold()


def _sort_key(column: str, advantages: Mapping[str, float]) -> Callable[[IndexEntry], Any]:
    if column == "advantage":
        return lambda e: advantages.get(e.id, 0.0)
    if column.startswith("rewards."):
        name = column.removeprefix("rewards.")
        return lambda e: e.rewards.get(name) or 0.0
    if column not in COLUMNS or column == "rewards":
        raise StoreError(f"the list cannot be sorted by {column[:40]!r}; choose a column of the list")
    value = attrgetter(column)
    if column in NUMBERS:
        return lambda e: value(e) or 0
    return lambda e: str(value(e) or "")


def whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a query's value as an integer.

    Raises:
        StoreError: the value is not an integer of at least 0.
    """
    value = query.get(name, "")
    if value and not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise StoreError(f"{name} must be a number of at least 0, found {value[:40]!r}")
    return int(value) if value else default


def _number(query: Mapping[str, str], name: str) -> float:
    try:
        return float(query[name])
    except ValueError:
        raise StoreError(f"{name} must be a number, found {query[name][:40]!r}") from None
