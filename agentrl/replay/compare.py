"""Where a replayed episode first differs from the recorded one, and why.

What is compared, in the order in which it happens: the seed; the first prompt; then for each turn what was read from the generation
(parser), what the tools gave (tool result), what the environment answered (env), whether and why the episode ended (limit, env), and the
ids that follow (template); at the end the rewards and the environment's state. The first difference is the report; what follows from it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.render.renderer import strip_control
from agentrl.replay.json_values import (
    as_text,
    first_unlike,
    first_unlike_part,
    one_begins_the_other,
    same,
    strings,
    tails,
)
from agentrl.replay.playback import OUTSIDE, Departure, sampled_span
from agentrl.types import Status, StopReason, Trajectory, Turn

CAUSES = ("seed", "template", "parser", "tool result", "env", "reward", "limit")
"""why a replay differs"""
LIMITS = (
    StopReason.MAX_TURNS,
    StopReason.MAX_TOKENS,
    StopReason.CONTEXT_FULL,
    StopReason.INVALID_ACTION_LIMIT,
)
_BEFORE, _AFTER = 6, 24
"""tokens shown around the first one that differs"""
Decode = Callable[[Sequence[int]], str]
Whole = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a recorded episode and its replay."""

    cause: str
    """one of CAUSES"""
    what: str
    """which value, in a few words"""
    turn: int
    """-1: before the first generation"""
    segment: int
    token: int
    """index in the segment of the first token that differs, or of the first that the differing value speaks of"""
    then: str
    """the recorded side, decoded"""
    today: str
    episode_id: str = ""

    def __str__(self) -> str:
        place = "the first prompt" if self.turn < 0 else f"turn {self.turn}"
        where = f"{place}, token {self.token}" + (f" of segment {self.segment}" if self.segment else "")
        return (
            f"{self.cause}: {strip_control(' '.join(self.what.split()))} at {where}\n"
            f"  then   {strip_control(repr(self.then))}\n  today  {strip_control(repr(self.today))}"
        )


def compare(
    then: Trajectory,
    today: Trajectory,
    departure: Departure | None,
    decode: Decode,
    whole: Whole = lambda sha256: None,
) -> Divergence | None:
    """The first difference, or None. `departure`: how the replay left the record, if it did; `whole`: outputs of tools by their hash."""
    found = next(Comparison(then, today, departure, decode, whole).differences(), None)
    return None if found is None else replace(found, episode_id=then.episode_id)


class Comparison:
    """Two sides of one episode."""

    def __init__(
        self, then: Trajectory, today: Trajectory, departure: Departure | None, decode: Decode, whole: Whole
    ) -> None:
        self.then, self.today, self.departure, self.decode, self.whole = then, today, departure, decode, whole

    def differences(self) -> Iterator[Divergence]:
        """All differences that can be seen, in order; those after the first may follow from it."""
        if self.then.seed != self.today.seed:
            yield self._at(-1, "seed", "the episode's seed", self.then.seed, self.today.seed)
        yield from self._context(-1)
        yield from self._end(-1)
        for turn in range(min(len(self.then.turns), len(self.today.turns))):
            yield from self._parse(turn)
            yield from self._results(turn)
            yield from self._answer(turn)
            yield from self._end(turn)
            yield from self._context(turn)
        yield from self._left()
        if self.departure is None and self.then.stop_reason not in OUTSIDE:
            yield from self._scores()

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _parse(self, turn: int) -> Iterator[Divergence]:
        then, today = self.then.turns[turn].action, self.today.turns[turn].action
        if then.text != today.text:
            at = first_unlike(then.text, today.text)
            yield self._in_generation(turn, "parser", "the text of the generation", then.text[at:], today.text[at:], at)
        surplus = [[e for e in a.errors if e.kind == "surplus"] for a in (then, today)]
        cause = "limit" if surplus[0] != surplus[1] else "parser"
        for name in ("calls", "errors", "answer", "finish_reason"):
            a, b = getattr(then, name), getattr(today, name)
            if not same(a, b):
                yield self._in_generation(
                    turn,
                    cause,
                    f"the {name} read from the generation",
                    *first_unlike_part(a, b),
                    self._offset(then.text, a, b),
                )

    def _results(self, turn: int) -> Iterator[Divergence]:
        then, today = self.then.turns[turn].action.results, self.today.turns[turn].action.results
        for n, (a, b) in enumerate(zip(then, today, strict=False)):
            if a.sha256 and b.sha256 and a.sha256 != b.sha256:
                x, y = self.whole(a.sha256), self.whole(b.sha256)
                if x is not None and y is not None:
                    yield self._at(turn, "tool result", f"the whole output of result {n} ({a.name})", *tails(x, y))
            for name in ("content", "is_error", "full_bytes", "sha256", "name"):
                x, y = getattr(a, name), getattr(b, name)
                if x != y:
                    yield self._at(turn, "tool result", f"{name} of result {n} ({a.name})", *tails(x, y))
        if self._went(self.then, turn, "tools_s") and len(then) != len(today):
            yield self._at(turn, "tool result", "the number of tool results", len(then), len(today))

    def _answer(self, turn: int) -> Iterator[Divergence]:
        then, today = self.then.turns[turn], self.today.turns[turn]
        if not (self._went(self.then, turn, "env_s") and self._went(self.today, turn, "env_s")):
            return
        a, b = list(then.observation.messages), list(today.observation.messages)
        if not same(a, b):
            cut = then.observation_cut_tokens != today.observation_cut_tokens and one_begins_the_other(a, b)
            cause = "limit" if cut else "env"
            what = "how much of the observation fits" if cut else "the observation"
            yield self._at(turn, cause, what, *first_unlike_part(a, b))
        if then.observation_cut_tokens != today.observation_cut_tokens:
            yield self._at(
                turn,
                "limit",
                "tokens cut from the observation",
                then.observation_cut_tokens,
                today.observation_cut_tokens,
            )
        told = [{k: v for k, v in t.info.items() if k != "new_segment"} for t in (then, today)]
        sides: list[tuple[str, Any, Any]] = [
            ("the step reward", then.reward, today.reward),
            ("info", told[0], told[1]),
            ("state_key", then.state_key, today.state_key),
            ("what the context policy left", then.context, today.context),
        ]
        for name, x, y in sides:
            if not same(x, y):
                yield self._at(turn, "env", name, x, y)

    def _end(self, turn: int) -> Iterator[Divergence]:
        """Does the episode end here on both sides, and for the same reason?"""
        goes_on = [self._goes_on(self.then, turn), self._goes_on(self.today, turn)]
        if all(goes_on) or (not goes_on[0] and self.then.stop_reason in OUTSIDE):
            return
        reasons = ["goes on" if on else _reason(t) for on, t in zip(goes_on, (self.then, self.today), strict=True)]
        if reasons[0] == reasons[1] or (turn >= len(self.today.turns) and turn >= 0):
            return
        enders = [t.stop_reason for on, t in zip(goes_on, (self.then, self.today), strict=True) if not on]
        yield self._at(turn, _cause_of_end(enders), "how the episode goes on", *reasons)

    def _context(self, turn: int) -> Iterator[Divergence]:
        """The ids sent for the next generation."""
        then, today = self._sent(self.then, turn + 1), self._sent(self.today, turn + 1)
        if then is None or today is None or then == today:
            return
        (seg_then, ids_then), (_, ids_today) = then, today
        at = first_unlike(ids_then, ids_today)
        window = slice(max(0, at - _BEFORE), at + _AFTER)
        what = "the ids of the first prompt" if turn < 0 else "the ids between the turns"
        yield Divergence(
            "template", what, turn, seg_then, at, self.decode(ids_then[window]), self.decode(ids_today[window])
        )

    def _left(self) -> Iterator[Divergence]:
        """What only the engine could see: other bounds, other stop strings."""
        left = self.departure
        if left is None or left.turn >= len(self.then.turns):
            return
        turn = self.then.turns[left.turn]
        span = sampled_span(self.then, turn)
        ids = span.ids if span else ()
        if left.kind == "room":
            at = turn.context_length + min(left.room, len(ids))
            then = f"{len(ids)} tokens sampled ({turn.action.finish_reason.value})"
            yield Divergence(
                "limit", "room for the generation", left.turn, turn.segment, at, then, f"room for {left.room} tokens"
            )
        if left.kind == "stop":
            at = turn.context_length + max(0, len(ids) - 1)
            what = "the stop string that ended the generation"
            yield Divergence("parser", what, left.turn, turn.segment, at, str(turn.matched_stop), "is none")

    def _scores(self) -> Iterator[Divergence]:
        last = len(self.then.turns) - 1
        a, b = dict(self.then.rewards), dict(self.today.rewards)
        for name in dict.fromkeys((*a, *b)):
            if not same(a.get(name, "no such component"), b.get(name, "no such component")):
                yield self._at(last, "reward", f"component {name}", a.get(name, "none"), b.get(name, "none"), end=True)
        if not same(self.then.weights, self.today.weights):
            yield self._at(
                last, "reward", "weights of the components", dict(self.then.weights), dict(self.today.weights), end=True
            )
        if not same(self.then.state, self.today.state):
            yield self._at(
                last, "env", "the final state", *first_unlike_part(self.then.state, self.today.state), end=True
            )

    # -- places ------------------------------------------------------------------------------------------------------

    def _at(self, turn: int, cause: str, what: str, then: Any, today: Any, *, end: bool = False) -> Divergence:
        """At the first id after this turn's generation that differs; where none does, at the first after the generation."""
        if turn < 0 or not self.then.turns:
            return Divergence(cause, what, turn, 0, 0, as_text(then), as_text(today))
        t = self.then.turns[turn]
        span = sampled_span(self.then, t)
        token = t.context_length + (len(span.ids) if span else 0)
        after = [self._sent(side, turn + 1) for side in (self.then, self.today)]
        if end:
            token = max(0, len(self.then.segments[t.segment]) - 1)
        elif after[0] and after[1] and after[0] != after[1] and after[0][0] == t.segment:
            token = first_unlike(after[0][1], after[1][1])
        return Divergence(cause, what, turn, t.segment, token, as_text(then), as_text(today))

    def _in_generation(self, turn: int, cause: str, what: str, then: Any, today: Any, offset: int) -> Divergence:
        """At the token of the generation in which the character `offset` of its text lies."""
        t = self.then.turns[turn]
        span = sampled_span(self.then, t)
        ids = span.ids if span else ()
        low, high = 0, max(0, len(ids) - 1)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self.decode(ids[: middle + 1])) > offset else (middle + 1, high)
        return Divergence(cause, what, turn, t.segment, t.context_length + low, as_text(then), as_text(today))

    def _offset(self, text: str, then: Any, today: Any) -> int:
        """Where in the text the first differing value stands (of a whole call, its longest part); 0 if it cannot be found."""
        a, b = first_unlike_part(then, today)
        for value, other in ((a, b), (b, a)):
            found = sorted((s for s in strings(value) if s and s in text), key=len)
            if found:
                said = found[-1]
                shared = first_unlike(said, other) if said is value and isinstance(other, str) else 0
                return text.index(said) + min(shared, len(said) - 1)
        return 0

    def _sent(self, t: Trajectory, turn: int) -> tuple[int, list[int]] | None:
        """(segment, ids) sent for a generation, if there was one."""
        if turn < len(t.turns):
            at: Turn = t.turns[turn]
            return at.segment, t.segments[at.segment].ids[: at.context_length]
        if t is self.today and self.departure is not None and self.departure.turn == turn and self.departure.sent:
            return len(t.segments) - 1, list(self.departure.sent)
        return None

    def _goes_on(self, t: Trajectory, turn: int) -> bool:
        """Is there a generation after this turn (or was one asked for)?"""
        more = turn + 1 < len(t.turns)
        return more or (t is self.today and self.departure is not None and self.departure.turn > turn)

    @staticmethod
    def _went(t: Trajectory, turn: int, clock: str) -> bool:
        """Did this part of the turn come to its end?"""
        return clock in t.turns[turn].timings


def _reason(t: Trajectory) -> str:
    return t.stop_reason.value + (f" ({t.cause})" if t.cause and t.status is Status.FAILED else "")


def _cause_of_end(enders: Sequence[StopReason]) -> str:
    if any(e in LIMITS for e in enders):
        return "limit"
    if StopReason.REWARD_FAILURE in enders:
        return "reward"
    return "tool result" if StopReason.TOOL_FAILURE in enders else "env"
