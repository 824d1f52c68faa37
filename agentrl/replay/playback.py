"""A generator and a tool executor that answer from a recorded episode, so that the real EpisodeRunner plays it again.

They end the episode (`LeftRecordError`) as soon as today's code requests something that the record does not hold. compare.py finds the reason.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from agentrl.core.message_images import PlacedImage
from agentrl.core.summary_request import SummaryRequest
from agentrl.core.timeout_pool import is_async
from agentrl.engine.base import Generation, Generator, SamplingParams
from agentrl.errors import EngineAbort, EngineFailure, ToolFailure
from agentrl.render.context_policy import Checked, ContextPolicy, ContextView
from agentrl.rollout.episode import EpisodeRunner, RewriteContext
from agentrl.rollout.recorder import GENERATED
from agentrl.rollout.seat import Player
from agentrl.rollout.tool_executor import ToolExecutor, answers_by_calls
from agentrl.tool import ToolSpec
from agentrl.types import Action, FinishReason, Message, Provenance, Span, StopReason, Trajectory, Turn

EXTERNAL_STOPS = (StopReason.EPISODE_TIMEOUT, StopReason.ENGINE_ABORT, StopReason.ENGINE_FAILURE)
"""ends that the clock or the engine caused; such a record is replayed up to its end"""


class LeftRecordError(EngineAbort):
    """The record does not hold what was requested."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the replay left the record: {kind}", "left the record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where and how today's code left the record."""

    kind: str
    """'context' (other ids were sent), 'room' (other token limits), 'stop' (other stop strings), 'calls' (other tool calls), 'summary' (the
    context policy asks for another summary, or for none), 'end' (the record has no more turns)"""
    turn: int
    sent: tuple[int, ...] = ()
    """ids sent to the engine"""
    room: int = 0
    """tokens requested, where `kind` is 'room'"""
    request: SummaryRequest | None = None
    """the summary that today's context policy asks for, where `kind` is 'summary'"""


class PlaybackGenerator:
    """Returns the generations of one recorded episode, as long as the requests equal the recorded ones."""

    def __init__(self, recorded: Trajectory) -> None:
        self.recorded = recorded
        self.turn = 0
        """turn of the next generation"""
        self.departure: Departure | None = None

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """The recorded generation of this turn."""
        turns, index = self.recorded.turns, self.turn
        if index >= len(turns):
            self._raise_recorded_end(ids)
            raise self.leave("end", index, ids)
        turn = turns[index]
        if turn.segment < 0 or list(ids) != self.recorded.segments[turn.segment].ids[: turn.context_length]:
            raise self.leave("context", index, ids)
        generation = recorded_generation(self.recorded, turn, sampling.routed_experts_from)
        cut = len(generation.ids) > sampling.max_new_tokens
        longer = generation.finish_reason is FinishReason.LENGTH and len(generation.ids) < sampling.max_new_tokens
        if cut or longer:
            raise self.leave("room", index, ids, sampling.max_new_tokens)
        if isinstance(generation.matched_stop, str) and generation.matched_stop not in sampling.stop:
            raise self.leave("stop", index, ids)
        self.turn += 1
        return generation

    async def reply(self, messages: Sequence[Message], *, seed: int) -> str:
        """The recorded text of this turn, of a role that is played by text."""
        if self.turn >= len(self.recorded.turns) or self.recorded.turns[self.turn].segment >= 0:
            raise self.leave("end", self.turn)
        self.turn += 1
        return self.recorded.turns[self.turn - 1].action.text

    async def release(self, session: str) -> None:
        """Do nothing: a recorded episode holds no cache."""

    async def rewrite_context(self, call: RewriteContext, policy: ContextPolicy, view: ContextView) -> Checked:
        """The result of today's policy; of an async one, which may call a model, the recorded result."""
        following = self.recorded.turns[self.turn] if self.turn < len(self.recorded.turns) else None
        asked = None if following is None else following.summary
        if not is_async(policy):
            today = await call(policy, view)
            request = today if isinstance(today, SummaryRequest) else None
            if following is not None and request != asked:
                raise self.leave("summary", self.turn, request=request)
            return today
        if asked is not None:
            return asked
        context = self.recorded.turns[self.turn - 1].context
        return None if context is None else list(context)

    def of_player(self, player: Player) -> Player:
        """What stands for the player of a role."""
        return self if isinstance(player, Generator) else self.reply

    def leave(
        self, kind: str, turn: int, ids: Sequence[int] = (), room: int = 0, request: SummaryRequest | None = None
    ) -> LeftRecordError:
        """Note the departure, if it is the first, and return the error to raise."""
        left = Departure(kind=kind, turn=turn, sent=tuple(ids), room=room, request=request)
        self.departure = self.departure or left
        return LeftRecordError(kind)

    def _raise_recorded_end(self, ids: Sequence[int]) -> None:
        """Raise what ended the episode from outside, if the context is the recorded one."""
        reason, cause = self.recorded.stop_reason, self.recorded.cause or ""
        if reason in EXTERNAL_STOPS and any(list(ids) == segment.ids for segment in self.recorded.segments):
            raise EngineFailure(cause, cause) if reason is StopReason.ENGINE_FAILURE else EngineAbort(cause, cause)


def recorded_generation(trajectory: Trajectory, turn: Turn, experts_from: int | None = None) -> Generation:
    """What the engine returned in a turn. `experts_from`: the first token whose routed experts are wanted; None: they stay in their file."""
    spans = sampled_spans(trajectory, turn)
    reason, matched = turn.action.finish_reason, turn.matched_stop
    if not spans:
        return Generation((), (), reason, matched)
    ids = tuple(chain.from_iterable(s.ids for s in spans))
    experts = None if experts_from is None else trajectory.segments[turn.segment].routed_experts
    return Generation(
        ids,
        tuple(chain.from_iterable(s.log_probs or (0.0,) * len(s.ids) for s in spans)),
        reason,
        matched,
        spans[-1].policy_version or 0,
        demonstration=spans[0].provenance is Provenance.DEMONSTRATION,
        versions=tuple((s.policy_version or 0, len(s.ids)) for s in spans) if len(spans) > 1 else (),
        routed_experts=experts and experts[experts_from : turn.context_length + len(ids) - 1],
    )


def sampled_spans(trajectory: Trajectory, turn: Turn) -> list[Span]:
    """The spans that were sampled in a turn, one for each version of the weights; none if the generation was empty."""
    spans = trajectory.segments[turn.segment].spans if turn.segment >= 0 else ()
    return [s for s in spans if s.turn == turn.index and s.provenance in GENERATED]


class PlaybackTools:
    """Answers the calls of one recorded episode with their recorded results; the tools in `live` are called again."""

    def __init__(self, generator: PlaybackGenerator, real: ToolExecutor, live: Container[str] = ()) -> None:
        self.generator = generator
        self.real = real
        self.live = live
        self.stateful: set[str] = set()
        """called tools that are methods of an object, such as the environment, which they may change"""

    async def execute(self, tools: Mapping[str, ToolSpec], action: Action) -> Action:
        """The action with its results, in order.

        Raises:
            ToolFailure: as recorded.
        """
        recorded = self.generator.recorded
        index = self.generator.turn - 1
        self.stateful |= {c.name for c in action.calls if c.name in tools and is_stateful(tools[c.name])}
        then = recorded.turns[index].action
        if action.calls != then.calls:
            raise self.generator.leave("calls", index)
        if answers_by_calls(tools, action):
            return action
        if all(c.name in self.live for c in action.calls):
            return await self.real.execute(tools, action)
        if not then.results:
            if recorded.stop_reason is StopReason.TOOL_FAILURE:
                raise ToolFailure(recorded.cause or "", recorded.cause)
            raise self.generator.leave("end", index)  # the episode ended while its tools ran
        results = list(then.results)
        for i, call in enumerate(action.calls):
            if call.name in self.live:
                called = await self.real.execute(tools, Action(action.text, (call,)))
                results[i] = called.results[0]
        return replace(action, results=tuple(results))


def is_stateful(spec: ToolSpec) -> bool:
    """True if calling the tool may change an object: it is a method of the environment or of a `Tool`."""
    return getattr(spec.fn, "__self__", None) is not None


class EveryTool:
    """The set of all names, for `live`."""

    def __contains__(self, name: object) -> bool:
        return True


def with_playback(runner: EpisodeRunner, generator: PlaybackGenerator, tools: PlaybackTools) -> EpisodeRunner:
    """The runner with a recorded episode in place of its engine and its tools."""
    rewrite = partial(generator.rewrite_context, runner.call_context_policy)
    driver = None if runner.driver is None else runner.driver.playback(generator.recorded)
    players = {r: generator.of_player(p) for r, p in runner.players.items()}
    return replace(
        runner,
        engine=generator,
        execute_tools=tools.execute,
        rewrite_context=rewrite,
        driver=driver,
        players=players,
        scorer=runner.scorer.with_judgements(generator.recorded.judgements),
    )
