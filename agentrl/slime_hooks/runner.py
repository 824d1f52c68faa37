"""Episodes played by a generate function written for slime, and by a rollout function; `SlimeRunner.run` stands in for `EpisodeRunner.run`."""

from __future__ import annotations

import asyncio
import inspect
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.engine.base import Generator, SamplingParams
from agentrl.errors import ContractError, EngineAbort, EngineFailure, EnvFailure, Failure, RewardFailure, boundary
from agentrl.render import Renderer
from agentrl.reward import Scorer
from agentrl.rollout.episode import Limits
from agentrl.rollout.outcomes import cause_of, scored
from agentrl.slime_hooks.generations import Exchange, Generations, current
from agentrl.slime_hooks.modules import sampling_params
from agentrl.slime_hooks.placement import place_samples
from agentrl.slime_hooks.sample import STATE_KEY, SlimeSample, new_sample, recorded_attributes, samples_in
from agentrl.train.sample import Sample
from agentrl.types import EpisodeSpec, Message, Status, StopReason, Trajectory

_STOP_REASONS = {
    Status.COMPLETED: StopReason.TERMINATED,
    Status.TRUNCATED: StopReason.MAX_TOKENS,
    Status.ABORTED: StopReason.ENGINE_ABORT,
    Status.FAILED: StopReason.ENV_FAILURE,
}
_FAILURES: Mapping[type[Failure], StopReason] = {
    EngineAbort: StopReason.ENGINE_ABORT,
    EngineFailure: StopReason.ENGINE_FAILURE,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class SlimeRunner:
    """Plays episodes with `async generate(args, sample, sampling_params)`, which returns a sample or several."""

    generate: Callable[..., Any]
    args: Namespace
    engine: Generator
    renderer: Renderer
    scorer: Scorer
    limits: Limits
    sampling: SamplingParams
    seed: int
    evaluation: bool = False

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """Play and score one episode. A failure of infrastructure becomes the trajectory's stop reason.

        Raises:
            ContractError: the function does not return samples, or trains tokens that were not sampled.
        """
        started = time.perf_counter()
        seed = derive_seed(self.seed, spec.index, spec.attempt)
        sample, generations = self.begin(spec)
        samples: list[Sample] = []
        reason: StopReason | None = None
        failure: Failure | None = None
        timer = asyncio.timeout(self.limits.episode_timeout_s)
        try:
            async with timer:
                samples = await self._call(sample, generations)
        except TimeoutError:
            if not timer.expired():
                raise
            reason = StopReason.EPISODE_TIMEOUT
        except Failure as e:
            failure = e
            reason = next((r for kind, r in _FAILURES.items() if isinstance(e, kind)), StopReason.ENV_FAILURE)
        finally:
            await self.engine.release(spec.episode_id)
        trajectory = self.trajectory(spec, seed, samples, generations.exchanges, reason, failure)
        elapsed = time.perf_counter() - started
        return await self.score(replace(trajectory, timings={**trajectory.timings, "episode_s": elapsed}))

    def begin(self, spec: EpisodeSpec) -> tuple[SlimeSample, Generations]:
        """The sample of an episode that begins, with its prompt, and what answers its requests."""
        task = spec.task.copy()
        prompt: str | list[Message] = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
        prompts: dict[str, tuple[int, ...]] = {}
        rendered = self.args.apply_chat_template
        if rendered or (rendered is None and not isinstance(prompt, str)):
            pieces = self.renderer.prompt(task.messages, task.metadata.get("tools") or ())
            ids = tuple(token for _, part in pieces for token in part)
            prompt = self.renderer.tokenizer.decode(ids)
            prompts[prompt] = ids
        generations = Generations(
            engine=self.engine,
            renderer=self.renderer,
            sampling=self.sampling,
            seeds=(self.seed, spec.index, spec.attempt),
            session=spec.episode_id,
            context_length=self.limits.context_length,
            prompts=prompts,
        )
        return new_sample(task, prompt, spec.group_index, spec.index), generations

    async def _call(self, sample: SlimeSample, generations: Generations) -> list[Sample]:
        more = {"evaluation": self.evaluation} if "evaluation" in inspect.signature(self.generate).parameters else {}
        token = current.set(generations)
        try:
            with boundary(EnvFailure, "custom generate function"):
                returned = self.generate(self.args, sample, sampling_params(self.args, self.sampling), **more)
                if not inspect.isawaitable(returned):
                    raise ContractError(
                        f"--custom-generate-function-path must be an async function, found {type(returned).__name__} returned"
                    )
                returned = await returned
        finally:
            current.reset(token)
        samples = samples_in(returned)
        if isinstance(samples, str):
            raise ContractError(f"the custom generate function must return a Sample or a list of them, found {samples}")
        return samples

    def trajectory(
        self,
        spec: EpisodeSpec,
        seed: int,
        samples: Sequence[Sample],
        exchanges: Sequence[Exchange],
        reason: StopReason | None = None,
        failure: Failure | None = None,
    ) -> Trajectory:
        """The record of an episode. Without samples, nothing of it is trained."""
        last = samples[-1] if samples else None
        if reason is None:
            assert last is not None, "an episode without a failure has a sample"
            reason = _STOP_REASONS[last.status]
        unplayed = reason.status in (Status.FAILED, Status.ABORTED) or not samples
        placed = place_samples(
            () if unplayed else samples,
            exchanges,
            self.renderer.tokenizer.decode,
            temperature=self.sampling.temperature,
        )
        rewards: dict[str, float | None] = {}
        try:
            rewards = {} if last is None else _rewards(last, self.scorer.reward_key)
        except RewardFailure as e:
            reason, failure = StopReason.REWARD_FAILURE, e
        return Trajectory(
            episode_id=spec.episode_id,
            group_index=spec.group_index,
            index=spec.index,
            attempt=spec.attempt,
            task=spec.task,
            env=getattr(self.generate, "__name__", "custom generate function"),
            segments=placed.segments,
            turns=placed.turns,
            stop_reason=reason,
            cause=cause_of(failure) if failure else _timeout_cause(reason),
            detail=str(failure) if failure else None,
            state={} if last is None else {STATE_KEY: recorded_attributes(last), "unused_generations": placed.unused},
            rewards=rewards,
            weights=dict.fromkeys(rewards, 1.0),
            seed=seed,
            timings={"generate_s": sum(e.seconds for e in exchanges)},
        )

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the rewards of the run; unchanged if it failed, or if the function set the sample's reward itself."""
        if trajectory.rewards or trajectory.status in (Status.FAILED, Status.ABORTED):
            return trajectory
        return await scored(self.scorer, trajectory)

    def close(self) -> None:
        """Do nothing: the function keeps its own resources."""


def _timeout_cause(reason: StopReason) -> str | None:
    return "during the custom generate function" if reason is StopReason.EPISODE_TIMEOUT else None


def _rewards(sample: Sample, key: str | None) -> dict[str, float | None]:
    """The reward that the function set itself, by component."""
    value = sample.reward
    if value is None:
        return {}
    if isinstance(value, dict):
        if key not in value:
            raise RewardFailure(
                f"the function set a reward with the components {sorted(value)}; name the one that counts with --reward-key",
                "reward: no key",
            )
        value = value[key]
    return {"reward": float(value)}
