"""The recorder of one episode: what is sent to the engine and what it returns, as segments of spans.

A context only grows by whole spans. Where a context is not an exact token prefix of the next (history rewritten, another agent, a template
whose deltas cannot be proven), a new segment opens. Sampled ids are appended once and never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentrl.core.message_images import PlacedImage
from agentrl.core.routed_experts import RoutedExperts, joined
from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import Generation
from agentrl.errors import InvariantError
from agentrl.types import Provenance, Segment, Span

GENERATED = (Provenance.SAMPLED, Provenance.DEMONSTRATION, Provenance.OTHER_AGENT)
"""Provenance of what a policy, an expert in its place, or another agent wrote."""
Piece = tuple[Provenance, Sequence[int]]
"""tokens of one provenance that were not sampled"""


class Recorder:
    """Builds the segments of one episode. Each agent (`agent_id`) has its own current segment."""

    def __init__(self) -> None:
        self._segments: list[_OpenSegment] = []
        self._current: dict[str, int] = {}

    def open(
        self,
        pieces: Iterable[Piece],
        *,
        turn: int = -1,
        agent_id: str = "policy",
        images: Iterable[PlacedImage] = (),
    ) -> int:
        """Begin a segment and return its index. `images`: their places in the pieces.

        Raises:
            InvariantError: the pieces hold no token.
        """
        pieces = [(provenance, ids) for provenance, ids in pieces if ids]
        if not pieces:
            raise InvariantError("a segment must begin with at least one token")
        self._segments.append(_OpenSegment(agent_id))
        self._current[agent_id] = len(self._segments) - 1
        self.extend(pieces, turn=turn, agent_id=agent_id, images=images)
        return self._current[agent_id]

    def extend(
        self, pieces: Iterable[Piece], *, turn: int, agent_id: str = "policy", images: Iterable[PlacedImage] = ()
    ) -> None:
        """Append tokens that were not sampled to the agent's current segment. Empty pieces are skipped."""
        segment = self._segments[self._current[agent_id]]
        segment.images += [PlacedImage(p.image, p.at + len(segment.ids), p.tokens) for p in images]
        for provenance, ids in pieces:
            if ids:
                segment.add(Span(provenance, tuple(ids), turn))

    def sampled(
        self, generation: Generation, *, turn: int, temperature: float, agent_id: str = "policy", frozen: bool = False
    ) -> None:
        """Append a generation, exactly as the engine returned it: a span for each version of the weights. An empty one adds no span.

        `frozen`: another model than the policy sampled it.
        """
        if not generation.ids:
            return
        segment = self._segments[self._current[agent_id]]
        if generation.routed_experts is not None and not frozen:
            segment.add_experts(generation.routed_experts, len(segment.ids) + len(generation.ids) - 1)
        if frozen:
            segment.add(Span(Provenance.OTHER_AGENT, generation.ids, turn))
            return
        if generation.demonstration:
            segment.add(Span(Provenance.DEMONSTRATION, generation.ids, turn))
            return
        end = 0
        for version, count in generation.versions or ((generation.policy_version, len(generation.ids)),):
            start, end = end, end + count
            ids, log_probs = generation.ids[start:end], generation.log_probs[start:end]
            segment.add(Span(Provenance.SAMPLED, ids, turn, log_probs, version, temperature or 1.0))

    def resume(self, segment: int) -> None:
        """Make a segment the current one of its agent, whose requests continue several conversations in turns."""
        self._current[self._segments[segment].agent_id] = segment

    def segment_ids(self, segment: int, end: int) -> list[int]:
        """A copy of the first `end` ids of a segment."""
        return self._segments[segment].ids[:end]

    def segment_length(self, segment: int) -> int:
        """Tokens of a segment so far."""
        return len(self._segments[segment].ids)

    def segment_images(self, segment: int) -> tuple[PlacedImage, ...]:
        """The images of a segment and their places in it."""
        return tuple(self._segments[segment].images)

    def context(self, agent_id: str = "policy") -> list[int]:
        """The ids of the agent's current segment, to be sent to the engine. The list is never modified afterwards; do not modify it."""
        segment = self._segments[self._current[agent_id]]
        segment.lent = True
        return segment.ids

    def images(self, agent_id: str = "policy") -> tuple[PlacedImage, ...]:
        """The images of the agent's current segment and their places in `context`."""
        return tuple(self._segments[self._current[agent_id]].images)

    def length(self, agent_id: str = "policy") -> int:
        """Tokens in the agent's current segment."""
        return len(self._segments[self._current[agent_id]].ids)

    def crc(self, agent_id: str = "policy") -> int:
        """The checksum of `context`, computed incrementally."""
        return self._segments[self._current[agent_id]].checksum()

    def last_generated(self, turn: int, agent_id: str = "policy") -> tuple[int, ...]:
        """The ids that the agent generated in `turn`, if they end its current segment."""
        ids: tuple[int, ...] = ()
        for span in reversed(self._segments[self._current[agent_id]].spans):
            if span.turn != turn or span.provenance not in GENERATED:
                break
            ids = span.ids + ids
        return ids

    def experts_length(self, agent_id: str = "policy") -> int:
        """Tokens of the agent's current segment, from its first on, whose routed experts are known."""
        return self._segments[self._current[agent_id]].experts_length

    def segment_index(self, agent_id: str = "policy") -> int:
        """Index of the agent's current segment."""
        return self._current[agent_id]

    def segments(self) -> tuple[Segment, ...]:
        """All segments so far."""
        return tuple(Segment(tuple(s.spans), s.agent_id, tuple(s.images), joined(s.experts)) for s in self._segments)


class _OpenSegment:
    """A segment under construction: its spans, their ids in one list, and the checksum of the ids."""

    __slots__ = ("_crc", "_summed", "agent_id", "experts", "experts_length", "ids", "images", "lent", "spans")

    def __init__(self, agent_id: str) -> None:
        self.agent_id = agent_id
        self.spans: list[Span] = []
        self.ids: list[int] = []
        self.images: list[PlacedImage] = []
        self.experts: list[RoutedExperts] = []
        self.experts_length = 0
        self.lent = False
        """an engine holds `ids`, so the next span replaces the list instead of extending it"""
        self._crc = self._summed = 0

    def add(self, span: Span) -> None:
        self.spans.append(span)
        if self.lent:
            self.ids, self.lent = [*self.ids, *span.ids], False
        else:
            self.ids.extend(span.ids)

    def add_experts(self, experts: RoutedExperts, end: int) -> None:
        """Keep the experts of the tokens up to `end`. Those that are known stay: the tokens after them were sampled with these.

        Raises:
            InvariantError: those of a token before are missing, or there are more than tokens.
        """
        start = end - experts.tokens
        if not 0 <= start <= self.experts_length:
            raise InvariantError(
                f"routed experts of the tokens {start} to {end} cannot follow those of the first {self.experts_length}"
            )
        if end > self.experts_length:
            self.experts.append(experts[self.experts_length - start :] if start < self.experts_length else experts)
            self.experts_length = end

    def checksum(self) -> int:
        self._crc = ids_checksum(self.ids[self._summed :], self._crc)
        self._summed = len(self.ids)
        return self._crc
