"""Symbolic rendering: the path that a template takes for unknown contents, and where each content goes.

A `SymbolicText` is a string that stands for any content. It records what the template asks about it (`startswith`, truth, length: kept as
conditions), what the template makes of it (`trim`, a slice, `tojson`: kept as steps), and where it is put. The result is a `Pattern` of
literals and slots. The template takes the same path for all contents that meet the conditions, so filling the slots gives exactly what
rendering would give. If something cannot be traced there is no pattern, and the template is rendered for each content.

This is concolic execution (Godefroid, Klarlund and Sen 2005, DART) of one Jinja render.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""a pure function of a string, and its further arguments"""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a pattern for content number `index`, after `steps`."""

    index: int
    steps: tuple[Step, ...] = ()

    def fill(self, contents: Sequence[str]) -> Any:
        """What the template makes of this content."""
        value: Any = contents[self.index]
        for function, args in self.steps:
            value = function(value, *args)
        return value

    def then(self, function: Callable[..., Any], *args: Any) -> Slot:
        """This slot after one more step."""
        return Slot(self.index, (*self.steps, (function, args)))


@dataclass
class Trace:
    """What one render asked about its symbolic texts, and whether all of them could be traced."""

    conditions: list[tuple[Slot, Any]] = field(default_factory=list)
    """(question, answer); the question's last step gives a truth value or a number"""
    untraceable: bool = False
    balance: int = 0
    """symbolic texts converted to output minus those in the output; not 0: some went where they cannot be traced"""

    def reset(self) -> None:
        """Start again with the same symbolic texts."""
        self.conditions, self.untraceable, self.balance = [], False, 0

    def record(self, question: Slot, answer: Any) -> Any:
        """Keep a condition and return its answer."""
        self.conditions.append((question, answer))
        return answer


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rendered string with slots for contents."""

    parts: tuple[str | Slot, ...]
    conditions: tuple[tuple[Slot, Any], ...]

    def holds(self, contents: Sequence[str]) -> bool:
        """Whether the template takes the same path for these contents."""
        try:
            return all(question.fill(contents) == answer for question, answer in self.conditions)
        except (IndexError, ValueError):
            return False

    def leaks(self, stand_ins: Iterable[str]) -> bool:
        """Whether a stand-in is among the literals, so that its text was copied without being traced."""
        literals = "\n".join(p for p in self.parts if isinstance(p, str))
        return any(s in literals or json.dumps(s)[1:-1] in literals for s in stand_ins if s)

    def fill(self, contents: Sequence[str]) -> str:
        """The string that rendering these contents gives, if `holds`."""
        return "".join(p if isinstance(p, str) else p.fill(contents) for p in self.parts)


class SymbolicText(str):
    """A string that contains unknown content. Its own characters are a stand-in for it."""

    parts: tuple[str | Slot, ...]
    trace: Trace

    @classmethod
    def of(cls, text: str, parts: Iterable[str | Slot], trace: Trace) -> SymbolicText:
        """Build from parts; adjacent literals are joined, empty ones left out."""
        self = str.__new__(cls, text)
        joined: list[str | Slot] = []
        for part in parts:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part != "":
                joined.append(part)
        self.parts, self.trace = tuple(joined), trace
        return self

    def __str__(self) -> str:
        self.trace.balance += 1
        return self

    def __add__(self, other: str) -> str:
        return SymbolicText.of(str.__add__(self, other), (*self.parts, *_parts(other)), self.trace)

    def __radd__(self, other: str) -> str:
        return SymbolicText.of(str.__add__(other, self), (*_parts(other), *self.parts), self.trace)

    def __bool__(self) -> bool:
        return bool(self.apply(bool))

    def __len__(self) -> int:
        return int(self.apply(len))

    def __hash__(self) -> int:
        self.trace.untraceable = True
        return str.__hash__(self)

    def __iter__(self) -> Iterator[str]:
        self.trace.untraceable = True
        yield from plain(self)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a pure function of the content: a text or a list of texts becomes symbolic, any other result a condition."""
        value = function(plain(self), *args)
        (slot, *more) = self.parts or ("",)
        if more or isinstance(slot, str) or any(isinstance(a, SymbolicText) for a in args):
            self.trace.untraceable = True
            return value
        if value is NotImplemented:
            return value
        result = slot.then(function, *args)
        if isinstance(value, str):
            return SymbolicText.of(value, (result,), self.trace)
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            self.trace.record(result.then(len), len(value))
            return [SymbolicText.of(v, (result.then(getitem, i),), self.trace) for i, v in enumerate(value)]
        if value is None or isinstance(value, (bool, int)):
            return self.trace.record(result, value)
        self.trace.untraceable = True
        return value


def plain(text: str) -> str:
    """The characters of a text as an ordinary string."""
    return str.__str__(text)


def _parts(text: str) -> tuple[str | Slot, ...]:
    return text.parts if isinstance(text, SymbolicText) else (text,)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The `tojson` filter that Hugging Face templates expect: plain JSON, nothing escaped for HTML."""
    if isinstance(value, SymbolicText):
        result: str = value.apply(_text_to_json, ensure_ascii)
        return result
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _text_to_json(text: str, ensure_ascii: bool) -> str:
    return json.dumps(text, ensure_ascii=ensure_ascii)


def _traced_method(name: str) -> Callable[..., Any]:
    function = getattr(str, name)

    def method(self: SymbolicText, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            self.trace.untraceable = True
            return function(plain(self), *args, **kwargs)
        return self.apply(function, *args)

    method.__name__ = name
    return method


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"}
_UNTRACED = set(dir(object)) - _COMPARISONS | {"__add__", "__len__", "__iter__", "__getnewargs__"}
for _name in dir(str):
    if _name not in _UNTRACED and callable(getattr(str, _name)):
        setattr(SymbolicText, _name, _traced_method(_name))


def mark_untraceable(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Mark the traces of symbolic arguments: they are about to be read where that cannot be recorded."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, SymbolicText):
            value.trace.untraceable = True


def concat(pieces: Iterable[str]) -> str:
    """Jinja's `concat`, which keeps symbolic texts."""
    listed = list(pieces)
    symbolic = [p for p in listed if isinstance(p, SymbolicText)]
    if not symbolic:
        return "".join(listed)
    trace = symbolic[0].trace
    trace.balance -= len(symbolic)
    return SymbolicText.of("".join(map(plain, listed)), (part for p in listed for part in _parts(p)), trace)
