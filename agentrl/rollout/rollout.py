"""Many episodes: bounded concurrency, retries, groups, and group rewards."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.errors import RewardFailure
from agentrl.reward import Scorer
from agentrl.rollout.branching import LEFT_RECORD, BranchRule, BranchSpec
from agentrl.rollout.failures import CauseTable, FailureMonitor
from agentrl.rollout.mixed_runner import MixedScorer
from agentrl.types import EpisodeSpec, Group, Status, StopReason, Trajectory

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 100_000
"""new objects between two garbage collections while episodes run"""

WEIGHT_UPDATE = "weight update"
"""cause of an attempt that ended because the weights changed; it costs no retry"""
Progress = Callable[[Trajectory], None]


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """The concurrency of a rollout, and how many failures it tolerates."""

    concurrency: int = 64
    """episodes at the same time"""
    max_retries: int = 2
    """further attempts for an episode whose infrastructure failed"""
    min_group_size: int = 2
    """a group with fewer members left is dropped, unless it was issued smaller"""
    max_failure_share: float = 0.5
    """lost episodes (failed in all attempts) per episode begun. Above it the rollout stops, once more than 8 are lost. Below 1 the rollout
    also stops if no group is left, or if more than max(16, 2 × concurrency) consecutive attempts fail. Attempts are not counted against the
    share: one server that dies fails every episode it had, and their next attempts succeed"""


class Runner(Protocol):
    """Plays episodes: an `EpisodeRunner`, or a `RemoteRunner` for other processes."""

    @property
    def scorer(self) -> Scorer | MixedScorer:
        """Scores whole groups."""

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """Play one episode; see `EpisodeRunner.run`."""


class Rollout:
    """Runs groups of episodes on one runner.

    Args:
        runner: plays the episodes.
        limits: the limits of all episodes together.
        env_limits: maximum concurrent episodes of an environment, by its label (`EpisodeSpec.env`).
        branching: where episodes are branched; None: nowhere.
    """

    def __init__(
        self,
        runner: Runner,
        limits: RolloutLimits,
        env_limits: Mapping[str, int] | None = None,
        branching: BranchRule | None = None,
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.branching = branching
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._env_slots = {env: asyncio.Semaphore(limit) for env, limit in (env_limits or {}).items()}

    async def run(
        self, groups: Iterable[Sequence[EpisodeSpec]], progress: Progress | None = None
    ) -> tuple[list[Group], CauseTable]:
        """Run all groups.

        Args:
            groups: consumed lazily, as slots become free.
            progress: called with each finished attempt, and again with those whose group reward failed.

        Returns:
            The groups that were not dropped, in order, and the table of causes.

        Raises:
            TooManyFailuresError: more failures than `RolloutLimits` allow.
            UsageError: user code broke its contract; all other episodes are closed first.
        """
        run = _Run(self.limits, progress or (lambda trajectory: None))
        tasks: list[asyncio.Task[Group | None]] = []
        try:
            with infrequent_gc:
                async with asyncio.TaskGroup() as task_group:
                    for specs in groups:
                        await run.admit(len(specs))
                        tasks.append(task_group.create_task(self._group(specs, run)))
        except ExceptionGroup as e:
            raise _first(e) from None  # the others follow from the first
        finished = [group for task in tasks if (group := task.result()) is not None]
        if not finished:
            run.monitor.check_nothing_left()
        return finished, run.table

    async def play_group(
        self, specs: Sequence[EpisodeSpec], monitor: FailureMonitor, progress: Progress
    ) -> tuple[Group | None, CauseTable]:
        """Run one group, beside others that share the concurrency of this rollout.

        Args:
            specs: its episodes.
            monitor: counts the failures of all these groups.
            progress: called with each finished attempt, and again with those whose group reward failed.

        Returns:
            The group, or None if it was dropped, and the causes of its attempts.

        Raises:
            TooManyFailuresError: more failures than `monitor` allows.
            UsageError: user code broke its contract; the group's other episodes are closed first.
        """
        counted: set[str] = set()

        def note(trajectory: Trajectory) -> None:
            if trajectory.episode_id not in counted:
                counted.add(trajectory.episode_id)
                monitor.table.add(trajectory)
            progress(trajectory)

        run = _Run(self.limits, note, monitor)
        try:
            group = await self._group(specs, run)
        except ExceptionGroup as e:
            raise _first(e) from None
        return group, run.table

    async def _group(self, specs: Sequence[EpisodeSpec], run: _Run) -> Group | None:
        async with (
            asyncio.TaskGroup() as task_group
        ):  # an error cancels and closes the other members before it propagates
            tasks = [task_group.create_task(self._tree(s, run)) for s in specs]
        trees = [tree for task in tasks if (tree := task.result())]
        if len(trees) < min(self.limits.min_group_size, len(specs)):
            run.table.dropped_groups += 1
            return None
        members = [t for tree in trees for t in tree]
        scored = await self._score(members, run)
        return Group(specs[0].group_index, specs[0].task, tuple(scored)) if scored else None

    async def _tree(self, spec: EpisodeSpec, run: _Run) -> list[Trajectory]:
        """One episode and its branches; empty if the episode is lost. A branch that is lost is left out."""
        root = await self._episode(spec, run)
        if root is None or self.branching is None:
            return [root] if root is not None else []
        specs = self.branching.branches(spec, root)
        run.add_waiting(len(specs))
        async with asyncio.TaskGroup() as task_group:
            tasks = [task_group.create_task(self._episode(s, run)) for s in specs]
        return [root, *(t for task in tasks if (t := task.result()) is not None)]

    async def _episode(self, spec: EpisodeSpec, run: _Run) -> Trajectory | None:
        """One episode with its retries; each attempt waits for a slot. None if the episode is lost."""
        attempt, last = spec.attempt, max(spec.attempt, self.limits.max_retries)
        if isinstance(spec, BranchSpec):  # its attempts are counted from its parent's
            last = spec.attempt + self.limits.max_retries
        while True:
            async with self._env_slots.get(spec.env) or nullcontext(), self._slots:
                if attempt == spec.attempt:
                    run.begin_episode()
                trajectory = await self.runner.run(_attempt_of(spec, attempt))
            run.table.add(trajectory)
            run.progress(trajectory)
            if trajectory.status not in (Status.FAILED, Status.ABORTED):
                run.monitor.succeeded()
                return trajectory
            last += trajectory.cause == WEIGHT_UPDATE  # not a failure of the episode
            lost = attempt >= last or trajectory.cause == LEFT_RECORD
            _log_failure(trajectory, run.table, lost=lost)
            run.monitor.failed(lost=lost)
            if lost:
                return None
            run.table.retried += 1
            attempt += 1

    async def _score(self, members: list[Trajectory], run: _Run) -> list[Trajectory] | None:
        """The members with their group rewards, with the retries of an episode; None if the group is lost."""
        for attempt in range(self.limits.max_retries + 1):
            try:
                return await self.runner.scorer.score_group(members)
            except RewardFailure as e:
                if attempt < self.limits.max_retries:
                    continue
                for before in members:
                    after = replace(before, stop_reason=StopReason.REWARD_FAILURE, cause=e.cause, detail=str(e))
                    run.table.recount(before, after)
                    run.progress(after)
        run.table.dropped_groups += 1
        run.monitor.add_lost(len(members))
        return None


class _Run:
    """The state of one call of `Rollout.run`."""

    def __init__(self, limits: RolloutLimits, progress: Progress, monitor: FailureMonitor | None = None) -> None:
        self.table = CauseTable()
        self.monitor = monitor or FailureMonitor(self.table, limits.max_failure_share, limits.concurrency)
        self.progress = progress
        self._max_waiting = limits.concurrency
        self._waiting = 0
        """episodes admitted that have no slot yet"""
        self._slot_taken = asyncio.Event()

    async def admit(self, episodes: int) -> None:
        """Wait until fewer than `concurrency` episodes wait for a slot, then add more."""
        while self._waiting >= self._max_waiting:
            self._slot_taken.clear()
            await self._slot_taken.wait()
        self.add_waiting(episodes)

    def add_waiting(self, episodes: int) -> None:
        """Add episodes that wait for a slot."""
        self._waiting += episodes

    def begin_episode(self) -> None:
        """An episode has its first slot."""
        self.monitor.begun += 1
        self._waiting -= 1
        self._slot_taken.set()


class _InfrequentGC:
    """A `with` block in which the garbage collector runs less often: episodes create many long-lived objects and few cycles.

    The thresholds are restored when the last of several concurrent rollouts ends.
    """

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._active = 0

    def __enter__(self) -> None:
        self._active += 1
        if self._active == 1:
            self._before = gc.get_threshold()
            if self._before[0]:
                gc.set_threshold(max(self._before[0], _GC_THRESHOLD), *self._before[1:])

    def __exit__(self, *_: object) -> None:
        self._active -= 1
        if not self._active:
            gc.set_threshold(*self._before)


infrequent_gc = _InfrequentGC()


def _attempt_of(spec: EpisodeSpec, attempt: int) -> EpisodeSpec:
    """The spec of an attempt. A branch keeps the attempt of its parent, whose seeds it needs, and counts its retries itself."""
    return spec.retried(attempt - spec.attempt) if isinstance(spec, BranchSpec) else replace(spec, attempt=attempt)


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _log_failure(trajectory: Trajectory, table: CauseTable, *, lost: bool) -> None:
    """Log a failed attempt: the first of each cause in a rollout as a warning, because a dead server fails many episodes at once."""
    reason = trajectory.stop_reason.value
    logger.log(
        logging.WARNING if table.counts[reason, trajectory.cause or ""] == 1 else logging.INFO,
        "episode %s, attempt %d: %s: %s; %s",
        trajectory.episode_id,
        trajectory.attempt,
        reason,
        trajectory.detail or trajectory.cause,
        "lost" if lost else "retried",
    )
