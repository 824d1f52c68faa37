"""Episodes played and recorded: in this process or in several, every attempt kept, in the order of their ordinals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.engine.base import Engine
from agentrl.rollout.failures import CauseTable
from agentrl.rollout.rollout import Rollout, Runner
from agentrl.run.components import Components
from agentrl.run.report import Report
from agentrl.store import exactness_violations
from agentrl.store.run_folder import RunFolder, settings_fingerprint
from agentrl.types import EpisodeSpec, Group, Trajectory


class Collected(NamedTuple):
    """What was played."""

    groups: list[Group]
    """those that stand"""
    table: CauseTable
    """what became of all attempts"""
    violations: int
    """exactness violations in all attempts"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Who plays, and how it samples."""

    version: int
    temperature: float
    seed: int


class Collector:
    """Plays orders of episodes on the run's engine into its record."""

    def __init__(self, components: Components, engine: Engine, folder: RunFolder, report: Report) -> None:
        self.components, self.engine, self.folder, self.report = components, engine, folder, report
        self.processes = components.runner_processes(engine)
        self.fingerprint = settings_fingerprint(components.config)

    async def play(self, specs: Sequence[Sequence[EpisodeSpec]], policy: Policy, *, step: int, split: str) -> Collected:
        """Play all of them, whatever fails, and record every attempt under `step` and `split`, also when the run is stopped."""
        attempts: dict[str, Trajectory] = {}
        progress = self.report.progress(sum(map(len, specs)), split)

        def heard(trajectory: Trajectory) -> None:
            if trajectory.episode_id not in attempts:
                progress.update()
            attempts[trajectory.episode_id] = trajectory

        groups: list[Group] = []
        violations = 0
        try:
            async with self._runner(policy) as runner:
                groups, table = await Rollout(runner, self.components.rollout_limits()).run(specs, heard)
            if self.processes is not None:
                table.counts.update(self.processes.deaths)
        finally:
            progress.close()
            final = attempts | {t.episode_id: t for g in groups for t in g.trajectories}
            order = sorted(final.values(), key=lambda t: (t.index, t.attempt))
            violations = await asyncio.to_thread(self._write, order, {"step": step, "split": split})
        return Collected(groups, table, violations)

    @asynccontextmanager
    async def _runner(self, policy: Policy) -> AsyncIterator[Runner]:
        """In this process, or in several."""
        keep = self.folder.episodes.outputs.write if self.components.config.env.keep_whole_outputs else None
        settings: dict[str, Any] = {"temperature": policy.temperature, "seed": policy.seed, "keep": keep}
        if self.processes is not None:
            async with self.processes.rollout(settings | {"policy_version": policy.version}) as remote:
                yield remote
            return
        runner = self.components.runner(self.engine, **settings)
        try:
            yield runner
        finally:
            runner.close()

    def _write(self, trajectories: Sequence[Trajectory], extra: dict[str, Any]) -> int:
        for t in trajectories:
            self.folder.episodes.write(t, **extra, config=self.fingerprint)
        return exactness_violations(trajectories)

    async def close(self) -> None:
        """Stop the processes."""
        if self.processes is not None:
            await self.processes.close()
