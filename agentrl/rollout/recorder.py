"""Recorder: what is sent to the engine and what comes back, as spans in a prefix tree.

A run's context only ever grows by whole spans; where a context is not an exact token prefix of the next (history rewritten, another
agent, a template that cannot be proven), a new segment opens. Sampled ids enter once and are never touched again.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation
from agentrl.errors import InvariantError
from agentrl.types import Provenance, Segment, Span

Piece = tuple[Provenance, Sequence[int]]
"""tokens of one provenance, not sampled"""


class Recorder:
    """Builds the segments of one episode. Each agent (`agent_id`) has a line of its own."""

    def __init__(self) -> None:
        self._segments: list[_Open] = []
        self._current: dict[str, int] = {}

    def open(
        self,
        pieces: Iterable[Piece],
        *,
        turn: int = -1,
        agent_id: str = "policy",
        images: Iterable[PlacedImage] = (),
    ) -> int:
        """Begin a segment; returns its index. `images`: where they stand in the pieces.

        Raises:
            InvariantError: no tokens: there is nothing to generate from.
        """
        pieces = [(provenance, ids) for provenance, ids in pieces if ids]
        if not pieces:
            raise InvariantError("a segment must begin with at least one token")
        self._segments.append(_Open(agent_id))
        self._current[agent_id] = len(self._segments) - 1
        self.extend(pieces, turn=turn, agent_id=agent_id, images=images)
        return self._current[agent_id]

    def extend(
        self, pieces: Iterable[Piece], *, turn: int, agent_id: str = "policy", images: Iterable[PlacedImage] = ()
    ) -> None:
        """Append tokens that were not sampled to the agent's current segment. Empty pieces are left out."""
        segment = self._segments[self._current[agent_id]]
        segment.images += [PlacedImage(p.image, p.at + len(segment.ids), p.tokens) for p in images]
        for provenance, ids in pieces:
            if ids:
                segment.add(Span(provenance, tuple(ids), turn))

    def sampled(self, generation: Generation, *, turn: int, temperature: float, agent_id: str = "policy") -> None:
        """Append what the engine sampled, exactly as it answered. An empty generation leaves no span."""
        if not generation.ids:
            return
        segment = self._segments[self._current[agent_id]]
        if generation.demonstration:
            segment.add(Span(Provenance.DEMONSTRATION, generation.ids, turn))
        else:
            segment.add(
                Span(
                    Provenance.SAMPLED,
                    generation.ids,
                    turn,
                    generation.log_probs,
                    generation.policy_version,
                    temperature or 1.0,
                )
            )

    def context(self, agent_id: str = "policy") -> list[int]:
        """The ids of the agent's current segment, to be sent to the engine. Not to be changed; it stays as it is."""
        segment = self._segments[self._current[agent_id]]
        segment.lent = True
        return segment.ids

    def images(self, agent_id: str = "policy") -> tuple[PlacedImage, ...]:
        """The images of the agent's current segment and where they stand in `context`."""
        return tuple(self._segments[self._current[agent_id]].images)

    def length(self, agent_id: str = "policy") -> int:
        """Tokens in the agent's current segment."""
        return len(self._segments[self._current[agent_id]].ids)

    def crc(self, agent_id: str = "policy") -> int:
        """CRC-32 of what `context` gives (as little-endian int32); only what is new since the last call is gone through."""
        return self._segments[self._current[agent_id]].checksum()

    def last_span(self, agent_id: str = "policy") -> Span:
        """The span appended last to the agent's current segment."""
        return self._segments[self._current[agent_id]].spans[-1]

    def segment_index(self, agent_id: str = "policy") -> int:
        """Index of the agent's current segment."""
        return self._current[agent_id]

    def observe(
        self, context: Sequence[int], generation: Generation, *, turn: int, temperature: float, agent_id: str = "policy"
    ) -> bool:
        """Record an exchange of an agent that is not ours (a gateway's): the context it sent and what it got.

        Goes on with the longest segment of that agent that is an exact prefix of `context`; else opens one. True if it went on.
        """
        best = -1
        for i, s in enumerate(self._segments):
            n = len(s.ids)
            if (
                s.agent_id == agent_id
                and n <= len(context)
                and (best < 0 or n > len(self._segments[best].ids))
                and s.ids == list(context[:n])
            ):
                best = i
        if best < 0:
            self.open([(Provenance.PROMPT, context)], agent_id=agent_id)
        else:
            self._current[agent_id] = best
            self.extend(
                [(Provenance.OBSERVATION, context[len(self._segments[best].ids) :])], turn=turn, agent_id=agent_id
            )
        self.sampled(generation, turn=turn, temperature=temperature, agent_id=agent_id)
        return best >= 0

    def segments(self) -> tuple[Segment, ...]:
        """All segments so far."""
        return tuple(Segment(tuple(s.spans), s.agent_id, tuple(s.images)) for s in self._segments)


class _Open:
    """A segment being built: its spans, their ids in one list, and the checksum of these."""

    __slots__ = ("_crc", "_summed", "agent_id", "ids", "images", "lent", "spans")

    def __init__(self, agent_id: str) -> None:
        self.agent_id = agent_id
        self.spans: list[Span] = []
        self.ids: list[int] = []
        self.images: list[PlacedImage] = []
        self.lent = False
        """somebody has `ids`, so it is replaced and not extended: no two lists of it while an engine works"""
        self._crc = self._summed = 0

    def add(self, span: Span) -> None:
        self.spans.append(span)
        if self.lent:
            self.ids, self.lent = [*self.ids, *span.ids], False
        else:
            self.ids.extend(span.ids)

    def checksum(self) -> int:
        """Of `ids`."""
        self._crc = zlib.crc32(array("i", self.ids[self._summed :]).tobytes(), self._crc)
        self._summed = len(self.ids)
        return self._crc
