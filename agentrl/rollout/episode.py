"""One episode: the policy in one Env instance, from the first prompt to the finished, scored Trajectory.

The order of limits (design §6), the first that holds ends the episode:

1. EPISODE_TIMEOUT, at any moment;
2. after a generation: MAX_TOKENS or CONTEXT_FULL if it was cut by length (whichever bound was the tighter one), then whatever the
   environment says (TERMINATED, ENV_TRUNCATED), then INVALID_ACTION_LIMIT;
3. before the next one: MAX_TURNS, MAX_TOKENS, CONTEXT_FULL. An observation that does not fit is cut, and the episode goes on only if
   one more token has room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.core.message_images import carry, image_parts
from agentrl.core.seeds import derive_seed
from agentrl.engine.base import Generation, Generator, SamplingParams
from agentrl.env import Env, check_reward
from agentrl.errors import (
    ContractError,
    EngineAbort,
    EngineFailure,
    EnvFailure,
    Failure,
    RewardFailure,
    ToolFailure,
    UsageError,
    boundary,
)
from agentrl.render.context_policy import ContextPolicy, ContextView, checked, newest, view_of
from agentrl.render.renderer import Renderer
from agentrl.render.truncation import anew, follow, is_long
from agentrl.reward import Scorer
from agentrl.rollout.env_instance import EnvInstance, Pools
from agentrl.rollout.recorder import Recorder
from agentrl.types import (
    Action,
    EpisodeSpec,
    FinishReason,
    Message,
    Observation,
    ParseError,
    Provenance,
    StepResult,
    StopReason,
    Trajectory,
    Turn,
)

_STOP_REASONS: Mapping[type[Failure], StopReason] = {
    EngineAbort: StopReason.ENGINE_ABORT,
    EngineFailure: StopReason.ENGINE_FAILURE,
    EnvFailure: StopReason.ENV_FAILURE,
    ToolFailure: StopReason.TOOL_FAILURE,
    RewardFailure: StopReason.REWARD_FAILURE,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an episode."""

    max_turns: int = 8
    max_response_tokens: int = 4096
    """all tokens after the prompt: sampled, observations, scaffold"""
    max_tokens_per_turn: int | None = None
    """of one generation; None: what the response budget leaves"""
    context_length: int = 8192
    """prompt and response together"""
    episode_timeout_s: float = 600.0
    max_invalid_actions: int = 3
    """turns whose action could not be parsed, before the episode ends"""
    max_calls_per_turn: int = 8


class EpisodeRunner:
    """Everything the episodes of one environment share. `run` plays one; any number may run at once."""

    def __init__(
        self,
        env: Callable[[], Env],
        env_class: type[Env],
        engine: Generator,
        renderer: Renderer,
        scorer: Scorer,
        *,
        limits: Limits,
        sampling: SamplingParams,
        seed: int,
        context_policy: ContextPolicy | None = None,
        pools: Pools | None = None,
    ) -> None:
        """`env` makes an instance (the class with its arguments); `sampling` is completed turn by turn (room, stop, seed).

        `context_policy` goes before the environment's own; `pools` are shared with other runners, if given.
        """
        self.make_env = env
        self.env_class = env_class
        self.engine = engine
        self.renderer = renderer
        self.scorer = scorer
        self.limits = limits
        self.sampling = replace(sampling, stop=renderer.stop, stop_token_ids=renderer.stop_token_ids)
        self.seed = seed
        self.context_policy = context_policy
        self.pools = pools or Pools(env_class)
        self.tool_executor = self.pools.tool_executor

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """Play, score and close. Failures come back as the trajectory's stop reason; raised are only a cancel and what no retry mends.

        Raises:
            UsageError: user code broke its contract, or the settings cannot work.
        """
        episode = Episode(self, spec)
        started = time.perf_counter()
        try:
            reason, failure = await episode.play_bounded()
        finally:
            await to_the_end(episode.close())
        if episode.instance.state_lost and reason not in _STOP_REASONS.values():  # nothing to score it by
            reason, failure = StopReason.ENV_FAILURE, episode.instance.close_failure
        episode.clock["episode_s"] = time.perf_counter() - started
        trajectory = episode.trajectory(reason, failure)
        if reason in _STOP_REASONS.values():
            return trajectory
        try:
            return await self.scorer.score(trajectory)
        except Failure as e:
            return replace(trajectory, stop_reason=StopReason.REWARD_FAILURE, cause=e.cause, detail=str(e))

    async def rewrite(self, policy: ContextPolicy, view: ContextView) -> list[Message] | None:
        """What a context policy makes of a conversation; None: it stays as it is."""
        with boundary(EnvFailure, "context policy"):
            made = await self.pools.env.call(policy, view, timeout_s=self.env_class.timeout_s)
        messages = checked(made, view)
        return None if messages is None else await carry(messages)

    def close(self) -> None:
        """Let the idle threads of the pools end."""
        self.pools.close()


class Episode:
    """The state of one episode while it runs."""

    def __init__(self, runner: EpisodeRunner, spec: EpisodeSpec) -> None:
        self.runner = runner
        self.spec = spec
        self.seed = derive_seed(runner.seed, spec.index, spec.attempt)
        self.recorder = Recorder()
        self.turns: list[Turn] = []
        self.draft: dict[str, Any] | None = None
        """the turn under way, as arguments of `Turn`"""
        self.conversation: list[Message] = []
        self.first = 0
        """messages of the first prompt"""
        self.prompt_length = 0
        self.invalid = 0
        self.instance = EnvInstance(runner.make_env, runner.env_class, runner.pools)
        self.demonstration = False
        self.close_failure: Failure | UsageError | None = None
        """why the engine's session could not be ended"""
        self.clock: dict[str, float] = {"generate_s": 0.0, "tools_s": 0.0, "env_s": 0.0}

    # -- from start to end -------------------------------------------------------------------------------------------

    async def play_bounded(self) -> tuple[StopReason, Failure | UsageError | None]:
        """Play under the episode's time limit; failures become stop reasons."""
        timer = asyncio.timeout(self.runner.limits.episode_timeout_s)
        try:
            async with timer:
                return await self.play(), None
        except TimeoutError:
            if not timer.expired():
                raise
            return StopReason.EPISODE_TIMEOUT, None
        except Failure as e:
            return next(reason for kind, reason in _STOP_REASONS.items() if isinstance(e, kind)), e

    async def play(self) -> StopReason:
        """Turn after turn until something ends the episode."""
        await self.reset()
        while True:
            room, bound = self.room()
            if room <= 0:
                return bound
            generation = await self.generate(room)
            if generation.finish_reason is FinishReason.LENGTH:
                return bound
            action: Action = self.now["action"]
            if action.calls:
                action = await self.use_tools(action)
            stop = await self.step(action)
            if stop is None and self.runner.renderer.is_placeholder(generation.ids):
                stop = StopReason.INVALID_ACTION_LIMIT  # whoever reads the context would look for an image there
            if stop is not None:
                return stop
            if self.now["index"] + 1 >= self.runner.limits.max_turns:
                return StopReason.MAX_TURNS
            stop = await self.observe()
            if stop is not None:
                return stop

    async def reset(self) -> None:
        """Make the environment, begin the task, render the first prompt."""
        runner = self.runner
        await self.instance.make(self.seed)
        self.spec = await carry_task(self.spec)
        first = await self.instance.call("reset", self.spec.task, seed=derive_seed(self.seed, "env"))
        first = Observation(tuple(await carry(Observation.of(first).messages)))
        if not first.messages:
            raise ContractError(
                f"{runner.env_class.label()}.reset returned an empty observation; return the first message"
            )
        system = runner.env_class.system_prompt
        self.conversation = [*([{"role": "system", "content": system}] if system else []), *first.messages]
        self.first = len(self.conversation)
        prompt = partial(runner.renderer.prompt, self.conversation, [t.schema for t in self.instance.tools.values()])
        pieces = await asyncio.to_thread(prompt) if is_long(self.conversation) else prompt()
        self.recorder.open(pieces, images=runner.renderer.placed(pieces, self.conversation))
        self.prompt_length = self.recorder.length()

    def room(self) -> tuple[int, StopReason]:
        """How many tokens may be sampled now, and the stop reason of the bound that sets it."""
        limits, length = self.runner.limits, self.recorder.length()
        context = limits.context_length - length
        budget = limits.max_response_tokens - self.response_length()
        if limits.max_tokens_per_turn is not None:
            budget = min(budget, limits.max_tokens_per_turn)
        return (context, StopReason.CONTEXT_FULL) if context < budget else (budget, StopReason.MAX_TOKENS)

    def response_length(self) -> int:
        """Tokens after the episode's first prompt (in the current segment: after its beginning, at least the first prompt's length)."""
        return max(0, self.recorder.length() - self.prompt_length)

    async def generate(self, room: int) -> Generation:
        """Ask the engine, record exactly what it sampled, read the action."""
        self.end_turn()
        runner, index = self.runner, len(self.turns)
        length, crc, context = self.recorder.length(), self.recorder.crc(), self.recorder.context()
        seed = derive_seed(runner.seed, self.spec.index, self.spec.attempt, "policy", index, 0)
        sampling = self.sampling(room, seed)
        started = time.perf_counter()
        with boundary(EngineFailure, "engine"):
            generation = await runner.engine.generate(
                context, sampling, session=self.spec.episode_id, images=self.recorder.images()
            )
        elapsed = time.perf_counter() - started
        if generation.finish_reason is FinishReason.ABORT:
            raise EngineAbort("the engine gave the generation up", "engine abort")
        if len(generation.ids) > room:
            raise EngineFailure(
                f"asked for at most {room} tokens, the engine sent {len(generation.ids)}", "engine: too many tokens"
            )
        self.clock["generate_s"] += elapsed
        self.demonstration |= generation.demonstration
        with boundary(EngineFailure, "the engine's answer"):
            self.recorder.sampled(generation, turn=index, temperature=runner.sampling.temperature)
        action = runner.renderer.parse(
            generation.ids, generation.finish_reason, runner.limits.max_calls_per_turn, context=context
        )
        if not generation.ids:
            action = replace(action, errors=(ParseError("structure", "the generation is empty"),))
        self.draft = {
            "index": index,
            "segment": self.recorder.segment_index(),
            "context_length": length,
            "action": action,
            "matched_stop": generation.matched_stop,
            "context_crc": crc,
            "seed": seed,
            "timings": {"generate_s": elapsed, "cached_tokens": generation.cached_tokens},
        }
        return generation

    def sampling(self, room: int, seed: int) -> SamplingParams:
        """Of this generation."""
        s = self.runner.sampling
        return SamplingParams(
            room, s.temperature, s.top_p, s.top_k, s.stop, s.stop_token_ids, s.ignore_eos, seed
        )  # `replace` takes three times as long

    async def use_tools(self, action: Action) -> Action:
        """Execute the action's calls."""
        started = time.perf_counter()
        done = await self.runner.tool_executor.execute(self.instance.tools, action)
        elapsed = time.perf_counter() - started
        self.clock["tools_s"] += elapsed
        self.now["action"] = done
        self.now["timings"]["tools_s"] = elapsed
        return done

    async def step(self, action: Action) -> StopReason | None:
        """Give the action to the environment; what ends the episode now, if anything."""
        started = time.perf_counter()
        result = await self.instance.call("step", action)
        elapsed = time.perf_counter() - started
        label = self.runner.env_class.label()
        if not isinstance(result, StepResult):
            raise ContractError(f"{label}.step must return a StepResult, found {type(result).__name__}: {result!r:.80}")
        if not isinstance(result.info, (dict, Mapping)):
            raise ContractError(f"{label}.step: StepResult.info must be a mapping, found {type(result.info).__name__}")
        self.clock["env_s"] += elapsed
        self.now.update(
            observation=Observation(tuple(await carry(Observation.of(result.observation).messages))),
            reward=check_reward(result.reward, self.runner.env_class),
            info=dict(result.info),
            state_key=result.state_key,
        )
        self.now["timings"]["env_s"] = elapsed
        self.invalid += not action.valid
        if result.terminated:
            return StopReason.TERMINATED
        if result.truncated:
            return StopReason.ENV_TRUNCATED
        return StopReason.INVALID_ACTION_LIMIT if self.invalid >= self.runner.limits.max_invalid_actions else None

    async def observe(self) -> StopReason | None:
        """Append the observation and the next turn's header to the context; a stop reason if there is no room for another token."""
        turn, renderer, limits = self.now, self.runner.renderer, self.runner.limits
        messages = turn["observation"].messages
        if not messages:
            raise ContractError(
                f"{self.runner.env_class.label()}.step ended nothing and observed nothing; return an observation or terminated=True"
            )
        context_room = limits.context_length - self.recorder.length()
        budget_room = limits.max_response_tokens - self.response_length()
        tight = StopReason.CONTEXT_FULL if context_room < budget_room else StopReason.MAX_TOKENS
        said, tools = renderer.message(turn["action"]), [t.schema for t in self.instance.tools.values()]
        grown = (renderer, self.conversation, said, messages, self.last_ids())
        most = min(limits.context_length, self.prompt_length + limits.max_response_tokens)
        policy = self.runner.context_policy or getattr(self.instance.env, "context_policy", None)
        if policy is not None:
            view = view_of(*grown, first=self.first, length=self.recorder.length(), limit=most, tools=tools)
            if (made := await self.runner.rewrite(policy, view)) is not None:
                turn["context"] = tuple(made)
        if "context" in turn:
            before, messages = newest(turn["context"])
            render = partial(anew, renderer, before, messages, "the context policy", most - 1, tools)
        else:
            room = min(context_room, budget_room) - 1
            render = partial(follow, *grown, room=room, room_anew=most - 1, tools=tools)
        found = await asyncio.to_thread(render) if is_long(messages) else render()
        if found is None:
            return tight
        if found.opens is not None:
            turn["info"]["new_segment"] = found.opens
            self.recorder.open(found.pieces, turn=turn["index"], images=found.images)
        else:
            self.recorder.extend(found.pieces, turn=turn["index"], images=found.images)
        if found.cut:
            turn |= {"observation": Observation(tuple(found.kept)), "observation_cut_tokens": found.cut}
        self.conversation = found.conversation
        return None

    # -- pieces ------------------------------------------------------------------------------------------------------

    def last_ids(self) -> tuple[int, ...]:
        """What was sampled in the last turn."""
        span = self.recorder.last_span()
        sampled = span.turn == self.now["index"] and span.provenance in (
            Provenance.SAMPLED,
            Provenance.DEMONSTRATION,
        )
        return span.ids if sampled else ()

    @property
    def now(self) -> dict[str, Any]:
        """The turn under way, to be completed."""
        assert self.draft is not None, "before the first generation"
        return self.draft

    def end_turn(self) -> None:
        """The turn under way is as it will stay."""
        if self.draft is not None:
            self.turns.append(Turn(**self.draft))
            self.draft = None

    async def close(self) -> None:
        """Close the environment, then the engine's session. Called once, whatever happened.

        What fails here stops nothing that follows: the cause is counted, and but for a lost state the episode stands.
        """
        await self.instance.close()
        try:
            with boundary(EngineFailure, "engine release"):
                async with asyncio.timeout(self.runner.env_class.timeout_s):
                    await self.runner.engine.release(self.spec.episode_id)
        except (Failure, UsageError) as e:
            self.close_failure = e

    def trajectory(self, reason: StopReason, failure: Failure | UsageError | None) -> Trajectory:
        """The immutable record, not yet scored."""
        self.end_turn()
        spec, closing = self.spec, self.instance.close_failure or self.close_failure
        self.clock["non_generation_s"] = max(0.0, self.clock.get("episode_s", 0.0) - self.clock["generate_s"])
        return Trajectory(
            episode_id=spec.episode_id,
            group_index=spec.group_index,
            index=spec.index,
            attempt=spec.attempt,
            task=spec.task,
            env=self.runner.env_class.label(),
            segments=self.recorder.segments(),
            turns=tuple(self.turns),
            stop_reason=reason,
            cause=cause_of(failure) if failure else (f"while closing: {cause_of(closing)}" if closing else None),
            detail=str(failure or closing) if failure or closing else self.too_long(reason),
            state=self.instance.state,
            seed=self.seed,
            demonstration=self.demonstration,
            timings=dict(self.clock),
        )

    def too_long(self, reason: StopReason) -> str | None:
        """What to say if there was no room for a single token."""
        if self.turns or reason is not StopReason.CONTEXT_FULL:
            return None
        limit = self.runner.limits.context_length
        return f"the first prompt takes {self.prompt_length} tokens and leaves no room in a context of {limit}"


def cause_of(error: Failure | UsageError) -> str:
    """In a few words."""
    return error.cause if isinstance(error, Failure) else str(error)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait until it is done; a cancel that comes meanwhile is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled
    task.result()


async def carry_task(spec: EpisodeSpec) -> EpisodeSpec:
    """The order with the images of its task as episodes carry them (see `carry`)."""
    prompt = spec.task.prompt
    if isinstance(prompt, str) or next(image_parts(prompt), None) is None:
        return spec
    return replace(spec, task=replace(spec.task, prompt=tuple(await carry(prompt))))
