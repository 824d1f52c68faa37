"""A proven pattern, compiled: the scaffold's ids are kept, and only the sections that hold content are encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.render.base import Pieces
from agentrl.render.template_trace import Part, Pattern
from agentrl.render.tokenizer import Tokenizer, whole_text
from agentrl.types import Provenance

_KEPT_CHARACTERS = 1 << 20
"""of contents whose ids are remembered, for each scaffold"""


@dataclass(frozen=True, slots=True)
class Section:
    """Text between two added tokens of the scaffold, with content in it."""

    parts: tuple[str | Part, ...]
    before: str | None
    after: str | None
    head: tuple[int, ...]
    """ids of the literal it begins with, alone"""
    tail: tuple[int, ...]
    """ids of the literal it ends with, alone"""


class Scaffold:
    """What a template puts between two generations, for messages of one shape."""

    def __init__(self, pattern: Pattern, tokenizer: Tokenizer) -> None:
        self.pattern = pattern
        self._tokenizer = tokenizer
        self._steps = _compile(pattern.parts, tokenizer)
        self._kept: dict[tuple[str, ...], Pieces] = {}
        """of contents seen before: episodes of a group ask the same questions and find the same passages"""
        self._room = _KEPT_CHARACTERS

    def pieces(self, contents: Sequence[str]) -> Pieces | None:
        """The ids for these contents, by provenance; None if the template would take another path for them."""
        key = tuple(contents)
        known = self._kept.get(key)
        if known is None:
            known = self._pieces([whole_text(c) for c in contents])
            if known is not None:
                self._keep(key, known)
        return known

    def _keep(self, key: tuple[str, ...], pieces: Pieces) -> None:
        """Remember them; forget all when there are too many."""
        size = sum(map(len, key)) + 1
        if size > self._room:
            self._kept.clear()
            self._room = _KEPT_CHARACTERS
        if size <= self._room:
            self._kept[key] = pieces
            self._room -= size

    def _pieces(self, contents: Sequence[str]) -> Pieces | None:
        if self.pattern.conditions and not self.pattern.holds(contents):
            return None
        pieces: list[tuple[Provenance, Sequence[int]]] = []
        for step in self._steps:
            if isinstance(step, Section):
                text = "".join(p if isinstance(p, str) else p.fill(contents) for p in step.parts)
                pieces += cut(self._tokenizer.encode_section(text, step.before, step.after), step.head, step.tail)
            else:
                pieces.append((Provenance.TEMPLATE, step))
        return merged(pieces)


def cut(ids: Sequence[int], head: Sequence[int], tail: Sequence[int]) -> list[tuple[Provenance, Sequence[int]]]:
    """Provenance within a section: what it begins and ends with as the scaffold alone does is the template's, the rest is content.

    A token that holds characters of both is counted as content. None of them is ever trained on.
    """
    n = _common(ids, head)
    m = min(_common(ids[::-1], tail[::-1]), len(ids) - n)
    end = len(ids) - m
    return [(Provenance.TEMPLATE, ids[:n]), (Provenance.OBSERVATION, ids[n:end]), (Provenance.TEMPLATE, ids[end:])]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def merged(pieces: Iterable[tuple[Provenance, Sequence[int]]]) -> Pieces:
    """Neighbours of one provenance made one, empty pieces left out; what has no such neighbour is kept as the tuple it is."""
    out: list[tuple[Provenance, Sequence[int]]] = []
    for kind, ids in pieces:
        if ids and out and out[-1][0] is kind:
            before = out[-1][1]
            if not isinstance(before, list):
                out[-1] = kind, before = kind, list(before)
            before.extend(ids)
        elif ids:
            out.append((kind, ids if isinstance(ids, tuple) else list(ids)))
    return tuple((kind, tuple(ids)) for kind, ids in out)


def _compile(parts: Sequence[str | Part], tokenizer: Tokenizer) -> list[Section | tuple[int, ...]]:
    """Split the pattern at the scaffold's added tokens."""
    steps: list[Section | tuple[int, ...]] = []
    section: list[str | Part] = []
    before: str | None = None

    def close(after: str | None) -> None:
        if any(isinstance(p, Part) for p in section):
            first, last = section[0], section[-1]
            head = tokenizer.encode_section(first, before, None) if isinstance(first, str) else []
            tail = tokenizer.encode_section(last, None, after) if isinstance(last, str) else []
            steps.append(Section(tuple(section), before, after, tuple(head), tuple(tail)))
        elif section:
            steps.append(tuple(tokenizer.encode_section("".join(map(str, section)), before, after)))
        section.clear()

    for part in parts:
        if isinstance(part, Part):
            section.append(part)
            continue
        at = 0
        for match in tokenizer.pattern.finditer(part):
            if match.start() > at:
                section.append(part[at : match.start()])
            close(match.group())
            steps.append((tokenizer.added[match.group()],))
            before, at = match.group(), match.end()
        if part[at:]:
            section.append(part[at:])
    close(None)
    return steps
