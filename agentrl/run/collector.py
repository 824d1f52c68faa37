"""Plays episodes, in this process or in several, and records every attempt in the order of the episodes' ordinals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from agentrl.engine.base import Engine, Generator
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.failures import CauseTable
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.rollout.rollout import Rollout, Runner
from agentrl.run.components import Components
from agentrl.run.progress import CountedGenerator, Progress
from agentrl.run.report import Report
from agentrl.run.runner_settings import RunnerSettings
from agentrl.slime_hooks.rollout_function import GetSpecs, play_rollout
from agentrl.slime_hooks.runner import SlimeRunner
from agentrl.store import exactness_violations
from agentrl.store.run_folder import RunFolder, settings_fingerprint
from agentrl.types import EpisodeSpec, Group, Trajectory


def record_order(trajectory: Trajectory) -> tuple[int, int, int, str]:
    """Sorts episodes by their ordinals and attempts, and branches after the episode that they branched from."""
    return trajectory.index, trajectory.attempt, trajectory.branch_turn, trajectory.episode_id


class CollectedEpisodes(NamedTuple):
    """The outcome of a rollout or an evaluation."""

    groups: list[Group]
    """the complete groups"""
    causes: CauseTable
    """stop reasons and causes of all attempts"""
    violations: int
    """exactness violations in all attempts"""


class Collector:
    """Plays groups of episodes on the run's engine and writes them into the run folder."""

    def __init__(
        self,
        components: Components,
        engine: Engine,
        folder: RunFolder,
        report: Report,
        show_line: Callable[[str], None],
    ) -> None:
        """`show_line` shows and logs the progress inside a rollout."""
        self.components, self.engine, self.folder, self.report = components, engine, folder, report
        self.show_line = show_line
        self.processes = components.runner_processes(engine)
        self._fingerprint = settings_fingerprint(components.config)

    async def collect(
        self,
        groups: Sequence[Sequence[EpisodeSpec]],
        *,
        policy_version: int,
        step: int,
        split: str,
        engine: Engine | None = None,
    ) -> CollectedEpisodes:
        """Play all groups with the seed and the temperature of `split`, on `engine` or else on the run's.

        Every finished attempt is recorded, also when the rollout fails or is cancelled.
        """
        attempts: dict[str, Trajectory] = {}
        name = f"rollout {step + 1}" if split == "train" else f"{split} after {step} rollouts"
        progress = Progress(sum(map(len, groups)), name, self.show_line)

        def note_attempt(trajectory: Trajectory) -> None:
            if trajectory.episode_id not in attempts:
                if trajectory.parent is None:  # a branch is part of its parent's place
                    progress.episode_done()
                if self.processes is not None:  # generations in other processes are not counted as they come
                    progress.tokens += trajectory.sampled_tokens
            attempts[trajectory.episode_id] = trajectory

        complete: list[Group] = []
        violations = 0
        settings = self.settings(split, policy_version)
        try:
            async with progress, self.runner(settings, CountedGenerator(engine or self.engine, progress)) as runner:
                rollout = Rollout(
                    runner,
                    self.components.rollout_limits(),
                    self.components.env_limits(),
                    self.components.branching(split),
                )
                complete, causes = await rollout.run(groups, note_attempt)
            if self.processes is not None:
                causes.counts.update(self.processes.deaths)
        finally:
            final = attempts | {t.episode_id: t for g in complete for t in g.trajectories}
            ordered = sorted(final.values(), key=record_order)
            violations = await asyncio.to_thread(self.record, ordered, step, split)
        return CollectedEpisodes(complete, causes, violations)

    async def collect_by_function(
        self, function: Callable[..., Any], get_specs: GetSpecs, *, policy_version: int, step: int
    ) -> CollectedEpisodes:
        """Have a rollout function (--rollout-function-path) play groups that `get_specs` hands out, and record its episodes."""
        settings = self.components.runner_settings("train", policy_version=policy_version)
        runner = self.components.slime_runner(self.engine, settings, function)
        groups, causes = await play_rollout(function, runner, get_specs, step)
        ordered = sorted((t for g in groups for t in g.trajectories), key=lambda t: t.index)
        violations = await asyncio.to_thread(self.record, ordered, step, "train")
        return CollectedEpisodes(groups, causes, violations)

    def settings(self, split: str, policy_version: int) -> RunnerSettings:
        """The settings of a runner that plays tasks of `split`."""
        outputs, config = self.folder.episodes.outputs, self.components.config
        keep = outputs.write if config.env.keep_whole_outputs else None
        return self.components.runner_settings(split, policy_version=policy_version, keep=keep)

    @asynccontextmanager
    async def runner(self, settings: RunnerSettings, generator: Generator | None = None) -> AsyncIterator[Runner]:
        """A runner on the run's engine, or on `generator` in front of it, here or in the runner processes."""
        if self.processes is not None:
            async with self.processes.rollout(settings) as runner:
                yield runner
            return
        function = self.components.generate_function
        local_runner: EpisodeRunner | MixedRunner | SlimeRunner
        if function is not None:
            local_runner = self.components.slime_runner(generator or self.engine, settings, function)
        else:
            local_runner = self.components.runner(generator or self.engine, settings)
        try:
            yield local_runner
        finally:
            local_runner.close()

    def record(self, trajectories: Sequence[Trajectory], step: int, split: str, **extra: Any) -> int:
        """Write the episodes with `extra` beside each; returns the number of exactness violations in them."""
        for t in trajectories:
            self.folder.episodes.write(t, step=step, split=split, config=self._fingerprint, **extra)
        if self.report.telemetry is not None:
            self.report.telemetry.episodes(trajectories, step, split)
        return exactness_violations(trajectories)

    async def close(self) -> None:
        """Stop the runner processes and the gateway."""
        if self.processes is not None:
            await self.processes.close()
        await self.components.close_agents()
