"""One episode: the policy in one Env instance, from the first prompt to the finished, scored Trajectory.

The limits are checked in this order; the first that holds ends the episode:

1. EPISODE_TIMEOUT, at any moment;
2. after a generation: MAX_TOKENS or CONTEXT_FULL if it was cut by length (whichever bound was tighter), then what the environment
   returns (TERMINATED, ENV_TRUNCATED), then INVALID_ACTION_LIMIT;
3. before the next generation: MAX_TURNS, MAX_TOKENS, CONTEXT_FULL. An observation that does not fit is cut, and the episode continues
   only if there is room for one more token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from agentrl.core.cancellation import complete_before_cancel
from agentrl.core.message_images import PlacedImage, load_images
from agentrl.core.seeds import derive_seed
from agentrl.engine.base import Generation, Generator, SamplingParams, check_generation, check_routed_experts
from agentrl.env import Env, check_flag, check_reward, takes_group_seed
from agentrl.errors import (
    ContractError,
    EngineAbort,
    EngineFailure,
    EnvFailure,
    Failure,
    UsageError,
    boundary,
    shown,
)
from agentrl.render.context_policy import Checked, ContextPolicy, ContextView, check_rewrite
from agentrl.render.renderer import Renderer
from agentrl.render.truncation import is_long
from agentrl.reward import Scorer
from agentrl.rollout.branching import BranchSpec, PlayBranch
from agentrl.rollout.env_instance import EnvInstance, ThreadPools
from agentrl.rollout.first_prompt import load_task_images, require_whole_prompt
from agentrl.rollout.outcomes import FAILURES, cause_of, scored
from agentrl.rollout.recorder import Recorder
from agentrl.rollout.seat import POLICY, Player, Reply, Seat, check_role, check_role_rewards, make_seats
from agentrl.rollout.seat_context import extend_context, speak
from agentrl.rollout.turn import TurnDraft
from agentrl.tool import ToolSpec
from agentrl.types import (
    Action,
    EpisodeSpec,
    FinishReason,
    Observation,
    ParseError,
    StepResult,
    StopReason,
    Trajectory,
    Turn,
)

_SPENT = {"generate_s": "generations", "tools_s": "tool calls", "env_s": "steps"}

ExecuteTools = Callable[[Mapping[str, ToolSpec], Action], Awaitable[Action]]
RewriteContext = Callable[[ContextPolicy, ContextView], Awaitable[Checked]]


class EpisodeDriver(Protocol):
    """Plays an episode in place of the loop over turns: an agent that asks for generations itself (agentrl.gateway)."""

    async def play(self, episode: Episode) -> StopReason:
        """Play from the environment's creation to the end. Failures are raised; the caller bounds the time and closes the environment."""

    def playback(self, recorded: Trajectory) -> EpisodeDriver:
        """A driver that makes the requests of a recorded episode again, without the agent."""

    async def close(self) -> None:
        """Free what the episodes share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of an episode."""

    max_turns: int = 8
    max_response_tokens: int = 4096
    """all tokens after the prompt: sampled, observations, chat template"""
    max_tokens_per_turn: int | None = None
    """maximum tokens of one generation; None: what the response budget leaves"""
    context_length: int = 8192
    """tokens of prompt and response together"""
    episode_timeout_s: float = 600.0
    max_invalid_actions: int = 3
    """turns whose action could not be parsed, before the episode ends"""
    max_calls_per_turn: int = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeRunner:
    """What the episodes of one environment share. `run` plays one episode; any number may run at the same time."""

    make_env: Callable[[], Env]
    env_class: type[Env]
    engine: Generator
    renderer: Renderer
    scorer: Scorer
    limits: Limits
    sampling: SamplingParams
    """max_new_tokens, stop and seed are set turn by turn"""
    seed: int
    pools: ThreadPools
    context_policy: ContextPolicy | None = None
    """takes precedence over the environment's own"""
    execute_tools: ExecuteTools | None = None
    """replaces the tool executor of `pools`, for replay"""
    rewrite_context: RewriteContext | None = None
    """replaces `call_context_policy`, for replay"""
    driver: EpisodeDriver | None = None
    """plays the episodes of an environment whose agent is a separate program; None: the loop over turns"""
    play_branch: PlayBranch | None = None
    """plays a `BranchSpec`; None: the rollout has no branches"""
    players: Mapping[str, Player] = field(default_factory=dict)
    """who plays the roles that the policy does not play, by role"""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """which of several adapters plays a role of the policy, by role; with the key '' that of all roles; empty: there is one policy"""

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """Play, score and close one episode. A failure of infrastructure becomes the trajectory's stop reason.

        Raises:
            UsageError: user code broke its contract, or the settings cannot work.
        """
        if isinstance(spec, BranchSpec):
            assert self.play_branch is not None, "a rollout with branches gives its runners what plays them"
            return await self.play_branch(self, spec)
        episode = Episode(self, spec)
        try:
            reason, failure = await episode.play_bounded()
        finally:
            await complete_before_cancel(episode.close())
        if episode.instance.state_lost and reason not in FAILURES.values():  # rewards may need the state
            reason, failure = StopReason.ENV_FAILURE, episode.instance.close_failure
        episode.timings |= {"episode_s": time.perf_counter() - episode.started, "ended_at": time.time()}
        trajectory = episode.trajectory(reason, failure)
        if reason in FAILURES.values():
            return trajectory
        return await scored(self.scorer, trajectory)

    async def call_context_policy(self, policy: ContextPolicy, view: ContextView) -> Checked:
        """The conversation that a context policy returns, or its request; None: unchanged."""
        with boundary(EnvFailure, "context policy"):
            returned = await self.pools.env.call(policy, view, timeout_s=self.env_class.timeout_s)
        messages = check_rewrite(returned, view)
        return await load_images(messages) if isinstance(messages, list) else messages

    def for_env(self, env: str) -> EpisodeRunner:
        """The runner of the environment with this label: itself, since it has one."""
        return self

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
        self.draft: TurnDraft | None = None
        self.seats = {POLICY: Seat(POLICY)}
        """the speakers by role"""
        self.seat = self.seats[POLICY]
        """the one that acts, or acted last"""
        self.instance = EnvInstance(runner.make_env, runner.env_class, runner.pools)
        self.demonstration = False
        self._schemas: list[dict[str, Any]] | None = None
        self.activity = "reset"
        """what the episode is doing, for the cause of a timeout"""
        self.release_failure: Failure | UsageError | None = None
        self.timings: dict[str, float] = {"generate_s": 0.0, "tools_s": 0.0, "env_s": 0.0}
        self.started = time.perf_counter()

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
            return next(reason for kind, reason in FAILURES.items() if isinstance(e, kind)), e

    async def play(self) -> StopReason:
        """Play turn after turn until something ends the episode."""
        if self.runner.driver is not None:
            return await self.runner.driver.play(self)
        await self.open_prompt(await self.reset())
        while True:
            stop = await (self.generated_turn() if self.seat.reply is None else self.spoken_turn(self.seat.reply))
            if stop is not None:
                return stop

    async def generated_turn(self) -> StopReason | None:
        """One turn of a model; the stop reason, if the episode ends with it."""
        room, bound = self.room()
        if room <= 0:
            return bound
        self.activity = "generation"
        draft, generation = await self.generate(room)
        if generation.finish_reason is FinishReason.LENGTH:
            return bound
        if draft.action.calls:
            self.activity = "tool calls"
            await self.use_tools(draft)
        self.activity = "step"
        stop = await self.step(draft)
        if stop is None and self.runner.renderer.is_placeholder(generation.ids):
            stop = StopReason.INVALID_ACTION_LIMIT  # readers of the context would expect an image at a placeholder
        return stop or await self.continue_after(draft)

    async def spoken_turn(self, reply: Reply) -> StopReason | None:
        """One turn of a role that is played by text; the stop reason, if the episode ends with it."""
        draft = await speak(self, reply)
        self.activity = "step"
        return await self.step(draft) or await self.continue_after(draft)

    async def continue_after(self, draft: TurnDraft) -> StopReason | None:
        """Give the observation to the role that acts next; a stop reason if none can."""
        if self.seat.turns >= self.runner.limits.max_turns:
            return StopReason.MAX_TURNS
        self.activity = "context"
        return await self.observe(draft)

    async def reset(self) -> Observation:
        """Create the environment and reset it; returns the first observation, with images loaded."""
        runner = self.runner
        await self.instance.create(self.seed, self.spec.task)
        if self.instance.env is not None and self.instance.env.roles:
            self.seats = make_seats(runner.env_class.label(), self.instance.env.roles, runner.players)
            self.seat = next(iter(self.seats.values()))
        self.spec = await load_task_images(self.spec)
        seeds = {"seed": derive_seed(self.seed, "env")}
        if takes_group_seed(runner.env_class):
            seeds["group_seed"] = derive_seed(runner.seed, "group", self.spec.group_index, "env")
        returned = await self.instance.call("reset", self.spec.task.copy(), **seeds)
        first = Observation.of(returned)
        return Observation(tuple(await load_images(first.messages)), first.to)

    async def open_prompt(self, first: Observation, turn: int = -1) -> None:
        """Render the first prompt of the role that reads `first`; `turn`: the one that it follows."""
        runner, label = self.runner, self.runner.env_class.label()
        if not first.messages:
            raise ContractError(f"{label}.reset returned an empty observation; return the first message")
        if first.to:
            self.seat = self.seats[check_role(first.to, self.seats, f"{label}: an observation")]
        seat, system = self.seat, runner.env_class.system_prompt
        seat.conversation = [*([{"role": "system", "content": system}] if system else []), *first.messages]
        seat.prompt_messages = len(seat.conversation)
        if seat.reply is not None:
            return
        require_whole_prompt(runner.env_class, runner.renderer, seat.conversation, self.tool_schemas())
        render = partial(runner.renderer.prompt, seat.conversation, self.tool_schemas())
        pieces = await asyncio.to_thread(render) if is_long(seat.conversation) else render()
        images = runner.renderer.placed(pieces, seat.conversation)
        self.recorder.open(pieces, turn=turn, agent_id=seat.role, images=images)
        seat.prompt_length = self.recorder.length(seat.role)

    async def generate(self, room: int) -> tuple[TurnDraft, Generation]:
        """Sample one generation, record it exactly and parse the action: the next turn begins."""
        self.end_turn()
        runner, index, role, frozen = self.runner, len(self.turns), self.seat.role, self.seat.generator is not None
        length, context = self.recorder.length(role), self.recorder.context(role)
        seed = self.turn_seed(index)
        sampling = self.sampling(room, seed, known=None if frozen else self.recorder.experts_length(role))
        start_s = time.perf_counter() - self.started
        generation, elapsed = await self.sample(context, sampling, self.recorder.images(role))
        crc = self.recorder.crc(role) if generation.context_crc is None else generation.context_crc
        temperature = runner.sampling.temperature
        with boundary(EngineFailure, "the engine's answer"):
            self.recorder.sampled(generation, turn=index, temperature=temperature, agent_id=role, frozen=frozen)
        action = runner.renderer.parse(
            generation.ids,
            generation.finish_reason,
            runner.limits.max_calls_per_turn,
            context=context,
            matched_stop=generation.matched_stop,
            tools=self.tool_schemas(),
        )
        if not generation.ids:
            action = replace(action, errors=(ParseError("structure", "the generation is empty"),))
        self.draft = TurnDraft(
            index=index,
            segment=self.recorder.segment_index(role),
            context_length=length,
            context_crc=crc,
            seed=seed,
            action=action,
            matched_stop=generation.matched_stop,
            timings={"start_s": start_s, "generate_s": elapsed, **generation.counts()},
            agent_id=role,
        )
        self.begin_turn(self.draft)
        return self.draft, generation

    def turn_seed(self, index: int) -> int:
        """The seed of a turn's generation."""
        return derive_seed(self.runner.seed, self.spec.index, self.spec.attempt, "policy", index, 0)

    def begin_turn(self, draft: TurnDraft) -> None:
        self.seat.turns += 1
        self.seat.last = draft

    async def sample(
        self, context: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage]
    ) -> tuple[Generation, float]:
        """One generation of the engine, checked, and its duration in seconds."""
        started = time.perf_counter()
        engine, session = self.seat.generator or self.runner.engine, self.seat.session(self.spec.episode_id)
        with boundary(EngineFailure, "engine"):
            generation = check_generation(
                await engine.generate(context, sampling, session=session, images=images), sampling.max_new_tokens
            )
            check_routed_experts(generation, sampling, len(context))
        elapsed = time.perf_counter() - started
        if generation.finish_reason is FinishReason.ABORT:
            raise EngineAbort("the engine aborted the generation", "engine abort")
        self.timings["generate_s"] += elapsed
        self.demonstration |= generation.demonstration
        return generation, elapsed

    async def use_tools(self, draft: TurnDraft) -> None:
        """Execute the action's calls."""
        execute = self.runner.execute_tools or self.runner.pools.tool_executor.execute
        started = time.perf_counter()
        draft.action = await execute(self.instance.tools, draft.action)
        elapsed = time.perf_counter() - started
        self.timings["tools_s"] += elapsed
        draft.timings["tools_s"] = elapsed

    async def step(self, draft: TurnDraft) -> StopReason | None:
        """Pass the action to the environment; the stop reason, if the episode ends here."""
        started = time.perf_counter()
        result = await self.instance.call("step", draft.action)
        elapsed = time.perf_counter() - started
        label = self.runner.env_class.label()
        if not isinstance(result, StepResult):
            raise ContractError(
                f"{label}.step must return a StepResult, found {type(result).__name__}: {shown(result, 80)}"
            )
        if not isinstance(result.info, (dict, Mapping)):
            raise ContractError(f"{label}.step: StepResult.info must be a mapping, found {type(result.info).__name__}")
        self.timings["env_s"] += elapsed
        observation = Observation.of(result.observation)
        draft.observation = Observation(tuple(await load_images(observation.messages)), observation.to)
        check = partial(check_reward, env_class=self.runner.env_class)
        draft.reward = check(result.reward)
        if result.rewards:
            draft.rewards = check_role_rewards(result, self.seats, label, check)
        terminated = check_flag("terminated", result.terminated, self.runner.env_class)
        truncated = check_flag("truncated", result.truncated, self.runner.env_class)
        draft.info = dict(result.info)
        draft.state_key = result.state_key
        draft.timings["env_s"] = elapsed
        self.seat.invalid_actions += not draft.action.valid
        if terminated:
            return StopReason.TERMINATED
        if truncated:
            return StopReason.ENV_TRUNCATED
        too_many = self.seat.invalid_actions >= self.runner.limits.max_invalid_actions
        return StopReason.INVALID_ACTION_LIMIT if too_many else None

    async def observe(self, draft: TurnDraft) -> StopReason | None:
        """Append the observation and the next turn's header to the context of the role that acts next.

        Returns:
            A stop reason if no room is left for another token.
        """
        messages, label = draft.observation.messages, self.runner.env_class.label()
        if not messages:
            raise ContractError(
                f"{label}.step returned no observation and did not end the episode; return an observation or terminated=True"
            )
        if to := draft.observation.to:
            self.seat = self.seats[check_role(to, self.seats, f"{label}.step: the observation")]
        if not self.seat.prompt_messages:
            await self.open_prompt(draft.observation, draft.index)
            return None
        if self.seat.reply is not None:
            self.seat.conversation += messages
            return None
        return await extend_context(self, draft, self.seat)

    async def close(self) -> None:
        """Close the environment, then the engine's session. Called once, after any outcome.

        A failure here does not stop the other closing steps. It is reported as the cause; the episode stands unless its state is lost.
        """
        await self.instance.close()
        try:
            with boundary(EngineFailure, "engine release"):
                async with asyncio.timeout(self.runner.env_class.timeout_s):
                    for seat in self.seats.values():
                        if seat.reply is None:
                            engine = seat.generator or self.runner.engine
                            await engine.release(seat.session(self.spec.episode_id))
        except (Failure, UsageError) as e:
            self.release_failure = e

    # -- parts -------------------------------------------------------------------------------------------------------

    def room(self) -> tuple[int, StopReason]:
        """How many tokens may be sampled now, and the stop reason of the bound that sets it."""
        limits = self.runner.limits
        context = limits.context_length - self.recorder.length(self.seat.role)
        budget = limits.max_response_tokens - self.response_length()
        if limits.max_tokens_per_turn is not None:
            budget = min(budget, limits.max_tokens_per_turn)
        return (context, StopReason.CONTEXT_FULL) if context < budget else (budget, StopReason.MAX_TOKENS)

    def response_length(self) -> int:
        """Tokens of the current segment beyond the length of the first prompt."""
        return max(0, self.recorder.length(self.seat.role) - self.seat.prompt_length)

    def sampling(self, room: int, seed: int, known: int | None = 0) -> SamplingParams:
        """The parameters of one generation; built directly, since `replace` takes three times as long.

        `known`: tokens of the context whose routed experts are recorded; None: the model's experts are not recorded.
        """
        s, renderer = self.runner.sampling, self.runner.renderer
        stops, start = (renderer.stop, renderer.stop_token_ids), None if s.routed_experts_from is None else known
        return SamplingParams(room, s.temperature, s.top_p, s.top_k, *stops, s.ignore_eos, seed, start, self.adapter())

    def adapter(self) -> str | None:
        """The adapter that plays the current seat; None: there is one policy, or a frozen model plays it."""
        adapters = self.runner.adapters
        return None if self.seat.generator is not None else adapters.get(self.seat.role, adapters.get(""))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas of the episode's tools, which do not change while it runs."""
        if self._schemas is None:
            self._schemas = [tool.schema for tool in self.instance.tools.values()]
        return self._schemas

    def timeout_detail(self) -> str:
        """How the time of an episode that timed out was spent."""
        spent = ", ".join(f"{self.timings[key]:.1f} s in {name}" for key, name in _SPENT.items())
        return (
            f"not finished after {self.runner.limits.episode_timeout_s:g} s (--episode-timeout-s), during {self.activity}, "
            f"with {len(self.turns)} turns played: {spent}"
        )

    def end_turn(self) -> None:
        if self.draft is not None:
            self.turns.append(self.draft.complete())
            self.draft = None

    def trajectory(self, reason: StopReason, failure: Failure | UsageError | None) -> Trajectory:
        """The immutable record, not yet scored."""
        self.end_turn()
        spec, closing = self.spec, self.instance.close_failure or self.release_failure
        cause, detail = None, None
        if failure or closing:
            cause = cause_of(failure) if failure else f"while closing: {cause_of(closing)}" if closing else None
            detail = str(failure or closing)
        elif reason is StopReason.EPISODE_TIMEOUT:
            cause, detail = f"during {self.activity}", self.timeout_detail()
        elif reason is StopReason.CONTEXT_FULL and not self.turns:
            limit = self.runner.limits.context_length
            detail = (
                f"the first prompt takes {self.seat.prompt_length} tokens and leaves no room in a context of {limit}"
            )
        self.timings["non_generation_s"] = max(0.0, self.timings.get("episode_s", 0.0) - self.timings["generate_s"])
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
            cause=cause,
            detail=detail,
            state=self.instance.state,
            seed=self.seed,
            demonstration=self.demonstration,
            timings=dict(self.timings),
            roles=tuple(role for role, seat in self.seats.items() if role != POLICY and seat.player is None),
        )
