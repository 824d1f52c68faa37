"""The first difference between a recorded episode and its replay, and its cause.

Compared in the order of events: the seed; the first prompt; for each turn the parsed generation (parser), the tool results (tool result), the
environment's answer (env), whether and why the episode ended (limit, env), and the ids that follow (template); at the end the rewards and the
environment's state. Only the first difference is reported, since later ones may follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from agentrl.core.sequences import first_difference
from agentrl.render.renderer import strip_control
from agentrl.replay.json_values import as_text, differ_only_in_length, excerpts, first_unequal_part, same, strings
from agentrl.replay.playback import EXTERNAL_STOPS, Departure, sampled_spans
from agentrl.types import Status, StopReason, Trajectory, Turn

CAUSES = ("seed", "template", "parser", "tool result", "env", "reward", "limit")
LIMITS = (
    StopReason.MAX_TURNS,
    StopReason.MAX_TOKENS,
    StopReason.CONTEXT_FULL,
    StopReason.INVALID_ACTION_LIMIT,
)
_TOKENS_BEFORE, _TOKENS_AFTER = 6, 24
"""tokens shown around the first that differs"""
Decode = Callable[[Sequence[int]], str]
ReadOutput = Callable[[str], str | None]
"""the full output of a tool by its SHA-256, if it was saved"""


class Place(NamedTuple):
    """A token of the recorded episode."""

    turn: int
    segment: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between a recorded episode and its replay."""

    cause: str
    """one of CAUSES"""
    what: str
    """the value that differs"""
    turn: int
    """-1: before the first generation"""
    segment: int
    token: int
    """index in the segment of the first token that differs, or of the first that the differing value affects"""
    then: str
    """the recorded value, decoded"""
    today: str
    episode_id: str = ""

    def __str__(self) -> str:
        place = "the first prompt" if self.turn < 0 else f"turn {self.turn}"
        where = f"{place}, token {self.token}" + (f" of segment {self.segment}" if self.segment else "")
        return (
            f"{self.cause}: {strip_control(' '.join(self.what.split()))} at {where}\n"
            f"  recorded  {strip_control(repr(self.then))}\n  replayed  {strip_control(repr(self.today))}"
        )


def compare(
    then: Trajectory,
    today: Trajectory,
    departure: Departure | None,
    decode: Decode,
    full_output: ReadOutput = lambda sha256: None,
) -> Divergence | None:
    """The first difference, or None.

    Args:
        then: the recorded episode.
        today: its replay.
        departure: how the replay left the record, if it did.
        decode: ids to text.
        full_output: reads full outputs of tools.
    """
    divergence = next(Comparison(then, today, departure, decode, full_output).differences(), None)
    return None if divergence is None else replace(divergence, episode_id=then.episode_id)


class Comparison:
    """The recorded episode beside its replay."""

    def __init__(
        self, then: Trajectory, today: Trajectory, departure: Departure | None, decode: Decode, full_output: ReadOutput
    ) -> None:
        self.then, self.today, self.departure = then, today, departure
        self.decode, self.full_output = decode, full_output

    def differences(self) -> Iterator[Divergence]:
        """All visible differences, in order; those after the first may follow from it."""
        if self.then.seed != self.today.seed:
            yield self._at(-1, "seed", "the episode's seed", self.then.seed, self.today.seed)
        yield from self._context(-1)
        yield from self._end(-1)
        for turn in range(min(len(self.then.turns), len(self.today.turns))):
            yield from self._action(turn)
            yield from self._results(turn)
            yield from self._step(turn)
            yield from self._end(turn)
            yield from self._context(turn)
        yield from self._departure()
        if self.departure is None and self.then.stop_reason not in EXTERNAL_STOPS:
            yield from self._scores()

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _action(self, turn: int) -> Iterator[Divergence]:
        then, today = self.then.turns[turn].action, self.today.turns[turn].action
        if then.text != today.text:
            at = first_difference(then.text, today.text)
            yield self._in_generation(turn, "parser", "the text of the generation", then.text[at:], today.text[at:], at)
        surplus = [[e for e in a.errors if e.kind == "surplus"] for a in (then, today)]
        cause = "limit" if surplus[0] != surplus[1] else "parser"
        for name in ("calls", "errors", "answer", "finish_reason"):
            a, b = getattr(then, name), getattr(today, name)
            if not same(a, b):
                what, offset = f"the {name} read from the generation", self._offset(then.text, a, b)
                yield self._in_generation(turn, cause, what, *first_unequal_part(a, b), offset)

    def _results(self, turn: int) -> Iterator[Divergence]:
        then, today = self.then.turns[turn].action.results, self.today.turns[turn].action.results
        for number, (a, b) in enumerate(zip(then, today, strict=False)):
            result = f"result {number} ({a.name})"
            if a.sha256 and b.sha256 and a.sha256 != b.sha256:
                x, y = self.full_output(a.sha256), self.full_output(b.sha256)
                if x is not None and y is not None:
                    yield self._at(turn, "tool result", f"the whole output of {result}", *excerpts(x, y))
            for name in ("content", "is_error", "full_bytes", "sha256", "name"):
                x, y = getattr(a, name), getattr(b, name)
                if x != y:
                    yield self._at(turn, "tool result", f"{name} of {result}", *excerpts(x, y))
        if "tools_s" in self.then.turns[turn].timings and len(then) != len(today):
            yield self._at(turn, "tool result", "the number of tool results", len(then), len(today))

    def _step(self, turn: int) -> Iterator[Divergence]:
        """What `Env.step` returned, if it did on both sides."""
        then, today = self.then.turns[turn], self.today.turns[turn]
        if not ("env_s" in then.timings and "env_s" in today.timings):
            return
        a, b = list(then.observation.messages), list(today.observation.messages)
        cut_then, cut_today = then.observation_cut_tokens, today.observation_cut_tokens
        if not same(a, b):
            cut = cut_then != cut_today and differ_only_in_length(a, b)
            cause, what = ("limit", "how much of the observation fits") if cut else ("env", "the observation")
            yield self._at(turn, cause, what, *first_unequal_part(a, b))
        if cut_then != cut_today:
            yield self._at(turn, "limit", "tokens cut from the observation", cut_then, cut_today)
        info_then, info_today = ({k: v for k, v in t.info.items() if k != "new_segment"} for t in (then, today))
        sides: list[tuple[str, Any, Any]] = [
            ("the step reward", then.reward, today.reward),
            ("the rewards of roles", then.rewards, today.rewards),
            ("the role that acts next", then.observation.to, today.observation.to),
            ("info", info_then, info_today),
            ("state_key", then.state_key, today.state_key),
            ("the result of the context policy", then.context, today.context),
        ]
        for name, x, y in sides:
            if not same(x, y):
                yield self._at(turn, "env", name, x, y)

    def _end(self, turn: int) -> Iterator[Divergence]:
        """Whether the episode ends here on both sides, and for the same reason."""
        continues = [self._continues(self.then, turn), self._continues(self.today, turn)]
        if all(continues) or (not continues[0] and self.then.stop_reason in EXTERNAL_STOPS):
            return
        sides = list(zip(continues, (self.then, self.today), strict=True))
        reasons = ["continues" if on else _reason(t) for on, t in sides]
        if reasons[0] == reasons[1] or (turn >= len(self.today.turns) and turn >= 0):
            return
        ends = [t.stop_reason for on, t in sides if not on]
        yield self._at(turn, _cause_of_end(ends), "how the episode continues", *reasons)

    def _context(self, turn: int) -> Iterator[Divergence]:
        """The ids sent for the next generation."""
        then, today = self._sent(self.then, turn + 1), self._sent(self.today, turn + 1)
        if then is None or today is None or then == today:
            return
        (segment, ids_then), (_, ids_today) = then, today
        token = first_difference(ids_then, ids_today)
        window = slice(max(0, token - _TOKENS_BEFORE), token + _TOKENS_AFTER)
        what = "the ids of the first prompt" if turn < 0 else "the ids between the turns"
        texts = self.decode(ids_then[window]), self.decode(ids_today[window])
        yield _divergence(Place(turn, segment, token), "template", what, *texts)

    def _departure(self) -> Iterator[Divergence]:
        """Differences in what was requested: token limits, stop strings, summaries."""
        departure = self.departure
        if departure is None or departure.turn >= len(self.then.turns):
            return
        turn = self.then.turns[departure.turn]
        sampled = len(self._sampled(turn))
        if departure.kind == "room":
            place = Place(turn.index, turn.segment, turn.context_length + min(departure.room, sampled))
            then = f"{sampled} tokens sampled ({turn.action.finish_reason.value})"
            yield _divergence(place, "limit", "room for the generation", then, f"room for {departure.room} tokens")
        if departure.kind == "summary":
            what = "the summary that the context policy asks for"
            sides = [r and asdict(r) for r in (turn.summary, departure.request)]
            yield self._at(departure.turn - 1, "env", what, *sides)
        if departure.kind == "stop":
            place = Place(turn.index, turn.segment, turn.context_length + max(0, sampled - 1))
            what = "the stop string that ended the generation"
            yield _divergence(place, "parser", what, str(turn.matched_stop), "not a stop string")

    def _scores(self) -> Iterator[Divergence]:
        last = len(self.then.turns) - 1
        a, b = dict(self.then.rewards), dict(self.today.rewards)
        for name in dict.fromkeys((*a, *b)):
            if not same(a.get(name, "no such component"), b.get(name, "no such component")):
                yield self._at(last, "reward", f"component {name}", a.get(name, "none"), b.get(name, "none"), end=True)
        if not same(self.then.weights, self.today.weights):
            weights = dict(self.then.weights), dict(self.today.weights)
            yield self._at(last, "reward", "weights of the components", *weights, end=True)
        if not same(self.then.state, self.today.state):
            parts = first_unequal_part(self.then.state, self.today.state)
            yield self._at(last, "env", "the final state", *parts, end=True)

    # -- places ------------------------------------------------------------------------------------------------------

    def _at(self, turn: int, cause: str, what: str, then: Any, today: Any, *, end: bool = False) -> Divergence:
        """Placed at the first id after this turn's generation that differs, else at the first id after it; `end`: at the segment's last."""
        if turn < 0 or not self.then.turns:
            return _divergence(Place(turn, 0, 0), cause, what, then, today)
        recorded = self.then.turns[turn]
        token = recorded.context_length + len(self._sampled(recorded))
        sent_then, sent_today = (self._sent(side, turn + 1) for side in (self.then, self.today))
        if end:
            token = max(0, len(self.then.segments[recorded.segment]) - 1) if recorded.segment >= 0 else 0
        elif sent_then and sent_today and sent_then != sent_today and sent_then[0] == recorded.segment:
            token = first_difference(sent_then[1], sent_today[1])
        return _divergence(Place(turn, recorded.segment, token), cause, what, then, today)

    def _in_generation(self, turn: int, cause: str, what: str, then: Any, today: Any, offset: int) -> Divergence:
        """Placed at the token of the generation that holds the character `offset` of its text."""
        recorded = self.then.turns[turn]
        ids = self._sampled(recorded)
        low, high = 0, max(0, len(ids) - 1)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self.decode(ids[: middle + 1])) > offset else (middle + 1, high)
        return _divergence(Place(turn, recorded.segment, recorded.context_length + low), cause, what, then, today)

    def _offset(self, text: str, then: Any, today: Any) -> int:
        """Where the first differing value stands in the text (of a whole call: its longest part); 0 if it cannot be located."""
        a, b = first_unequal_part(then, today)
        for value, other in ((a, b), (b, a)):
            quotes = sorted((s for s in strings(value) if s and s in text), key=len)
            if quotes:
                quoted = quotes[-1]
                shared = first_difference(quoted, other) if quoted is value and isinstance(other, str) else 0
                return text.index(quoted) + min(shared, len(quoted) - 1)
        return 0

    def _sampled(self, turn: Turn) -> tuple[int, ...]:
        return tuple(i for span in sampled_spans(self.then, turn) for i in span.ids)

    def _sent(self, trajectory: Trajectory, turn: int) -> tuple[int, list[int]] | None:
        """(segment, ids) sent for a generation, if there was one."""
        if turn < len(trajectory.turns):
            at = trajectory.turns[turn]
            if at.segment < 0:
                return None
            return at.segment, trajectory.segments[at.segment].ids[: at.context_length]
        left = self.departure
        if trajectory is self.today and left is not None and left.turn == turn and left.sent:
            return len(trajectory.segments) - 1, list(left.sent)
        return None

    def _continues(self, trajectory: Trajectory, turn: int) -> bool:
        """True if a generation after this turn was made or requested."""
        left = self.departure
        requested = trajectory is self.today and left is not None and left.turn > turn
        return turn + 1 < len(trajectory.turns) or requested


def _divergence(place: Place, cause: str, what: str, then: Any, today: Any) -> Divergence:
    return Divergence(
        cause=cause,
        what=what,
        turn=place.turn,
        segment=place.segment,
        token=place.token,
        then=as_text(then),
        today=as_text(today),
    )


def _reason(t: Trajectory) -> str:
    return t.stop_reason.value + (f" ({t.cause})" if t.cause and t.status is Status.FAILED else "")


def _cause_of_end(ends: Sequence[StopReason]) -> str:
    if any(e in LIMITS for e in ends):
        return "limit"
    if StopReason.REWARD_FAILURE in ends:
        return "reward"
    return "tool result" if StopReason.TOOL_FAILURE in ends else "env"
