"""An engine and a tool executor that answer from a recorded episode, so that the real EpisodeRunner plays it again.

They stop the episode (`Diverged`) as soon as the record has no answer to what today's code asks; why that is, compare.py finds out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

from agentrl.core.message_images import PlacedImage
from agentrl.core.timeout_pool import is_async
from agentrl.engine.base import Generation, SamplingParams
from agentrl.errors import EngineAbort, EngineFailure, ToolFailure
from agentrl.render.context_policy import ContextPolicy, ContextView
from agentrl.rollout.tool_executor import ToolExecutor
from agentrl.tool import ToolSpec
from agentrl.types import Action, FinishReason, Message, Provenance, Span, StopReason, Trajectory, Turn

OUTSIDE = (StopReason.EPISODE_TIMEOUT, StopReason.ENGINE_ABORT, StopReason.ENGINE_FAILURE)
"""ends that no code of ours brought about: the record is played up to them"""


Rewrite = Callable[[ContextPolicy, ContextView], Awaitable[list[Message] | None]]


class Diverged(EngineAbort):
    """The record has no answer to what is asked of it."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the replay left the record: {kind}", "left the record")


@dataclass(frozen=True, slots=True)
class Departure:
    """How today's code left the record."""

    kind: str
    """'context' (other ids were sent), 'room' (other bounds), 'stop' (other stop strings), 'calls' (other tool calls), 'end' (no more turns)"""
    turn: int
    sent: tuple[int, ...] = ()
    room: int = 0


class PlaybackEngine:
    """Answers generation after generation from one recorded episode, as long as what it is asked is what was asked then."""

    def __init__(self, recorded: Trajectory) -> None:
        self.recorded = recorded
        self.turn = 0
        self.departure: Departure | None = None

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """The recorded generation of this turn."""
        turns, index = self.recorded.turns, self.turn
        if index >= len(turns):
            self._end_of_record(ids)
            raise self.leave("end", index, ids)
        turn = turns[index]
        if list(ids) != self.recorded.segments[turn.segment].ids[: turn.context_length]:
            raise self.leave("context", index, ids)
        answer = recorded_generation(self.recorded, turn)
        bounded = len(answer.ids) > sampling.max_new_tokens
        longer = answer.finish_reason is FinishReason.LENGTH and len(answer.ids) < sampling.max_new_tokens
        if bounded or longer:
            raise self.leave("room", index, ids, sampling.max_new_tokens)
        if isinstance(answer.matched_stop, str) and answer.matched_stop not in sampling.stop:
            raise self.leave("stop", index, ids)
        self.turn += 1
        return answer

    async def rewrite(self, live: Rewrite, policy: ContextPolicy, view: ContextView) -> list[Message] | None:
        """Today's policy; of one that is async, and so may ask a model, what it made when the episode was recorded."""
        if not is_async(policy):
            return await live(policy, view)
        made = self.recorded.turns[self.turn - 1].context
        return None if made is None else list(made)

    def leave(self, kind: str, turn: int, ids: Sequence[int] = (), room: int = 0) -> Diverged:
        """Note the departure (the first counts)."""
        self.departure = self.departure or Departure(kind, turn, tuple(ids), room)
        return Diverged(kind)

    def _end_of_record(self, ids: Sequence[int]) -> None:
        """Where the engine or the clock ended the episode, end it so again, if the context is what it was."""
        reason, cause = self.recorded.stop_reason, self.recorded.cause or ""
        last = self.recorded.segments[-1].ids if self.recorded.segments else []
        if reason in OUTSIDE and list(ids) == last:
            raise EngineFailure(cause, cause) if reason is StopReason.ENGINE_FAILURE else EngineAbort(cause, cause)

    async def release(self, session: str) -> None:
        """Do nothing: a recorded episode holds no cache."""


def recorded_generation(t: Trajectory, turn: Turn) -> Generation:
    """What the engine answered in a turn."""
    span = sampled_span(t, turn)
    reason, matched = turn.action.finish_reason, turn.matched_stop
    if span is None:
        return Generation((), (), reason, matched)
    expert = span.provenance is Provenance.DEMONSTRATION
    log_probs = span.log_probs or (0.0,) * len(span.ids)
    return Generation(span.ids, log_probs, reason, matched, span.policy_version or 0, demonstration=expert)


def sampled_span(t: Trajectory, turn: Turn) -> Span | None:
    """The span that was sampled in a turn; None: the generation was empty."""
    mine = (Provenance.SAMPLED, Provenance.DEMONSTRATION)
    return next((s for s in t.segments[turn.segment].spans if s.turn == turn.index and s.provenance in mine), None)


class PlaybackToolExecutor:
    """Answers the calls of one recorded episode, turn after turn, with their recorded results; those in `live` are really made."""

    def __init__(self, engine: PlaybackEngine, real: ToolExecutor, live: Container[str] = ()) -> None:
        self.engine = engine
        self.real = real
        self.live = live
        self.stateful: set[str] = set()
        """tools that were called whose function belongs to an object, such as the environment, which they may change"""

    async def execute(self, tools: Mapping[str, ToolSpec], action: Action) -> Action:
        """The action with its results, in order.

        Raises:
            ToolFailure: as recorded.
        """
        recorded = self.engine.recorded
        index = self.engine.turn - 1
        self.stateful |= {c.name for c in action.calls if c.name in tools and is_stateful(tools[c.name])}
        then = recorded.turns[index].action
        if action.calls != then.calls:
            raise self.engine.leave("calls", index)
        if all(c.name in self.live for c in action.calls):
            return await self.real.execute(tools, action)
        if not then.results:
            if recorded.stop_reason is StopReason.TOOL_FAILURE:
                raise ToolFailure(recorded.cause or "", recorded.cause)
            raise self.engine.leave("end", index)  # cut off while its tools ran
        results = list(then.results)
        for i, call in enumerate(action.calls):
            if call.name in self.live:
                one = await self.real.execute(tools, Action(action.text, (call,)))
                results[i] = one.results[0]
        return Action(**{**_fields(action), "results": tuple(results)})

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Those of the calls that were really made."""
        return self.real.counts

    def close(self) -> None:
        """Let the real tool executor's threads end."""
        self.real.close()


def is_stateful(spec: ToolSpec) -> bool:
    """Does calling it perhaps change an object (a method of the environment or of a `Tool`)?"""
    return getattr(spec.fn, "__self__", None) is not None


class EveryTool:
    """The set of all names, for `live`."""

    def __contains__(self, name: object) -> bool:
        return True


def play_back(runner: Any, recorded: Trajectory, live: Container[str] = ()) -> PlaybackEngine:
    """Put a recorded episode under a runner in place of its engine and tool executor; returns the engine."""
    engine = PlaybackEngine(recorded)
    runner.engine = engine
    real = runner.tool_executor.real if isinstance(runner.tool_executor, PlaybackToolExecutor) else runner.tool_executor
    runner.tool_executor = cast(ToolExecutor, PlaybackToolExecutor(engine, real, live))
    runner.rewrite = partial(engine.rewrite, MethodType(type(runner).rewrite, runner))
    return engine


def _fields(action: Action) -> dict[str, Any]:
    return {n: getattr(action, n) for n in ("text", "calls", "errors", "finish_reason", "answer")}
