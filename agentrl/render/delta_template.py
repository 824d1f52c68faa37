"""A proven pattern, compiled: the ids of the template's own text are kept, and only sections with content are encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.core.sequences import first_difference
from agentrl.render.accelerators.memo import Memo
from agentrl.render.base import Pieces
from agentrl.render.template_trace import Pattern, Slot
from agentrl.render.tokenizer import Tokenizer, replace_surrogates
from agentrl.types import Provenance

MEMO_CHARACTERS = 1 << 20
"""of contents whose ids one delta template keeps: the members of a group find the same passages"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Text with content in it, between two added tokens of the template."""

    parts: tuple[str | Slot, ...]
    before: str | None
    after: str | None
    head: tuple[int, ...]
    """ids of the literal with which it begins, encoded alone"""
    tail: tuple[int, ...]
    """ids of the literal with which it ends, encoded alone"""


class DeltaTemplate:
    """What a template puts between two generations, for messages of one shape."""

    def __init__(self, pattern: Pattern, tokenizer: Tokenizer) -> None:
        self.pattern = pattern
        self._tokenizer = tokenizer
        self._steps = _compile(pattern.parts, tokenizer)
        self.memo: Memo[tuple[str, ...], Pieces] = Memo(MEMO_CHARACTERS)

    def pieces(self, contents: Sequence[str]) -> Pieces | None:
        """The ids for these contents, by provenance, or None if the template takes another path for them."""
        key = tuple(contents)
        pieces = self.memo.get(key)
        if pieces is None:
            pieces = self.encode(contents)
            if pieces is not None:
                self.memo.put(key, pieces, sum(map(len, key)) + 1)
        return pieces

    def encode(self, contents: Sequence[str]) -> Pieces | None:
        """The same as `pieces`, without the memo."""
        contents = [replace_surrogates(c) for c in contents]
        if self.pattern.conditions and not self.pattern.holds(contents):
            return None
        pieces: list[tuple[Provenance, Sequence[int]]] = []
        for step in self._steps:
            if isinstance(step, _Section):
                text = "".join(p if isinstance(p, str) else p.fill(contents) for p in step.parts)
                ids = self._tokenizer.encode_section(text, step.before, step.after)
                pieces += split_provenance(ids, step.head, step.tail)
            else:
                pieces.append((Provenance.TEMPLATE, step))
        return merged(pieces)


def split_provenance(
    ids: Sequence[int], head: Sequence[int], tail: Sequence[int]
) -> list[tuple[Provenance, Sequence[int]]]:
    """The ids of a section by provenance: those shared with `head` and `tail` are the template's, the others content.

    A token that holds characters of both counts as content. Neither is ever trained on.
    """
    start = first_difference(ids, head)
    end = len(ids) - min(first_difference(ids[::-1], tail[::-1]), len(ids) - start)
    return [
        (Provenance.TEMPLATE, ids[:start]),
        (Provenance.OBSERVATION, ids[start:end]),
        (Provenance.TEMPLATE, ids[end:]),
    ]


def merged(pieces: Iterable[tuple[Provenance, Sequence[int]]]) -> Pieces:
    """The pieces without empty ones, neighbours of one provenance joined. A tuple without such a neighbour is kept as the same object."""
    joined: list[tuple[Provenance, Sequence[int]]] = []
    for kind, ids in pieces:
        if ids and joined and joined[-1][0] is kind:
            previous = joined[-1][1]
            if not isinstance(previous, list):
                joined[-1] = kind, previous = kind, list(previous)
            previous.extend(ids)
        elif ids:
            joined.append((kind, ids if isinstance(ids, tuple) else list(ids)))
    return tuple((kind, tuple(ids)) for kind, ids in joined)


def _compile(parts: Sequence[str | Slot], tokenizer: Tokenizer) -> list[_Section | tuple[int, ...]]:
    """The pattern split at the template's added tokens: ids, and sections with content."""
    steps: list[_Section | tuple[int, ...]] = []
    section: list[str | Slot] = []
    before: str | None = None

    def close_section(after: str | None) -> None:
        if any(isinstance(p, Slot) for p in section):
            first, last = section[0], section[-1]
            head = tokenizer.encode_section(first, before, None) if isinstance(first, str) else []
            tail = tokenizer.encode_section(last, None, after) if isinstance(last, str) else []
            parts = tuple(section)
            steps.append(_Section(parts=parts, before=before, after=after, head=tuple(head), tail=tuple(tail)))
        elif section:
            steps.append(tuple(tokenizer.encode_section("".join(map(str, section)), before, after)))
        section.clear()

    for part in parts:
        if isinstance(part, Slot):
            section.append(part)
            continue
        start = 0
        for match in tokenizer.pattern.finditer(part):
            if match.start() > start:
                section.append(part[start : match.start()])
            close_section(match.group())
            steps.append((tokenizer.added[match.group()],))
            before, start = match.group(), match.end()
        if part[start:]:
            section.append(part[start:])
    close_section(None)
    return steps
