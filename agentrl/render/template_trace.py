"""Rendering a template with unknown contents: which path it takes, and where each content goes.

A `Hole` is a string whose value stands for any content. It records what the template asks about it (`startswith`, truth, length: kept
as conditions), what the template makes of it (`trim`, a slice, `tojson`: kept as steps), and where it is put. What comes out is a
`Pattern`: literals and holes. For contents that answer every condition alike, the template takes the same path, so filling the holes
gives exactly the string that rendering would give. Whatever cannot be followed makes the pattern None: then one renders each time.

This is concolic execution (Godefroid, Klarlund and Sen 2005, DART) of one Jinja render.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""a pure function of a string, and its further arguments"""


@dataclass(frozen=True, slots=True)
class Part:
    """A place of a pattern: content number `index`, after `steps`."""

    index: int
    steps: tuple[Step, ...] = ()

    def fill(self, contents: Sequence[str]) -> Any:
        """What the template makes of this content."""
        value: Any = contents[self.index]
        for function, args in self.steps:
            value = function(value, *args)
        return value


@dataclass
class Trace:
    """What one render asked and whether it could be followed."""

    conditions: list[tuple[Part, Any]] = field(default_factory=list)
    """(question, answer): the steps end in a truth value or a number"""
    opaque: bool = False
    balance: int = 0
    """holes turned to text less holes put out; not 0: some went where they cannot be followed"""

    def reset(self) -> None:
        """Begin anew with the same holes."""
        self.conditions, self.opaque, self.balance = [], False, 0

    def ask(self, part: Part, answer: Any) -> Any:
        """Keep a condition."""
        self.conditions.append((part, answer))
        return answer


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rendered string with holes."""

    parts: tuple[str | Part, ...]
    conditions: tuple[tuple[Part, Any], ...]

    def holds(self, contents: Sequence[str]) -> bool:
        """Would the template take the same path for these contents?"""
        try:
            return all(part.fill(contents) == answer for part, answer in self.conditions)
        except (IndexError, ValueError):
            return False

    def leaks(self, stand_ins: Iterable[str]) -> bool:
        """Is a stand-in among the literals? Then it went somewhere unseen."""
        literals = "\n".join(p for p in self.parts if isinstance(p, str))
        return any(s in literals or json.dumps(s)[1:-1] in literals for s in stand_ins if s)

    def fill(self, contents: Sequence[str]) -> str:
        """The string that rendering these contents gives (if `holds`)."""
        return "".join(p if isinstance(p, str) else p.fill(contents) for p in self.parts)


class Hole(str):
    """A string that contains unknown content. Its own value is a stand-in."""

    parts: tuple[str | Part, ...]
    trace: Trace

    @classmethod
    def of(cls, text: str, parts: Iterable[str | Part], trace: Trace) -> Hole:
        """Build; neighbouring literals are joined, empty ones left out."""
        self = str.__new__(cls, text)
        merged: list[str | Part] = []
        for part in parts:
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif part != "":
                merged.append(part)
        self.parts, self.trace = tuple(merged), trace
        return self

    def __str__(self) -> str:
        self.trace.balance += 1
        return self

    def __add__(self, other: str) -> str:
        return Hole.of(str.__add__(self, other), (*self.parts, *_parts(other)), self.trace)

    def __radd__(self, other: str) -> str:
        return Hole.of(str.__add__(other, self), (*_parts(other), *self.parts), self.trace)

    def __bool__(self) -> bool:
        return bool(self.apply(_truth))

    def __len__(self) -> int:
        return int(self.apply(_length))

    def __hash__(self) -> int:
        self.trace.opaque = True
        return str.__hash__(self)

    def __iter__(self) -> Iterator[str]:
        self.trace.opaque = True
        yield from bare(self)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a pure function on the content: text gives a new hole, a list of texts several, anything else is a condition."""
        plain = bare(self)
        if len(self.parts) != 1 or isinstance(self.parts[0], str) or any(isinstance(a, Hole) for a in args):
            self.trace.opaque = True
            return function(plain, *args)
        part = Part(self.parts[0].index, (*self.parts[0].steps, (function, args)))
        value = function(plain, *args)
        if value is NotImplemented:
            return value
        if isinstance(value, str):
            return Hole.of(value, (part,), self.trace)
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            self.trace.ask(Part(part.index, (*part.steps, (len, ()))), len(value))
            return [
                Hole.of(v, (Part(part.index, (*part.steps, (_item, (i,)))),), self.trace) for i, v in enumerate(value)
            ]
        if value is None or isinstance(value, (bool, int)):
            return self.trace.ask(part, value)
        self.trace.opaque = True
        return value


def bare(text: str) -> str:
    """The stand-in text of a hole, as a plain string."""
    return str.__str__(text)


def _parts(text: str) -> tuple[str | Part, ...]:
    return text.parts if isinstance(text, Hole) else (text,)


def _truth(text: str) -> bool:
    return bool(text)


def _length(text: str) -> int:
    return len(text)


def _item(values: list[str], index: int) -> str:
    return values[index]


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The `tojson` filter as Hugging Face templates expect it: plain JSON, nothing escaped for HTML."""
    if isinstance(value, Hole):
        result: str = value.apply(_dumps, ensure_ascii)
        return result
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dumps(text: str, ensure_ascii: bool) -> str:
    return json.dumps(text, ensure_ascii=ensure_ascii)


def _method(name: str) -> Callable[..., Any]:
    function = getattr(str, name)

    def method(self: Hole, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            self.trace.opaque = True
            return function(bare(self), *args, **kwargs)
        return self.apply(function, *args)

    method.__name__ = name
    return method


_KEPT = set(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"} | {
    "__add__",
    "__len__",
    "__iter__",
    "__getnewargs__",
}
for _name in dir(str):
    if _name not in _KEPT and callable(getattr(str, _name)):
        setattr(Hole, _name, _method(_name))


def blind(args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Something is about to read its arguments where holes cannot see it."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Hole):
            value.trace.opaque = True


def joined(pieces: Iterable[str]) -> str:
    """Jinja's `concat`, following holes."""
    listed = list(pieces)
    holes = [p for p in listed if isinstance(p, Hole)]
    if not holes:
        return "".join(listed)
    trace = holes[0].trace
    trace.balance -= len(holes)
    text = "".join(bare(p) if isinstance(p, Hole) else p for p in listed)
    return Hole.of(text, (q for p in listed for q in _parts(p)), trace)
