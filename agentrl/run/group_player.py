"""Plays one group after another for a window, and records the groups that a rollout trains on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from agentrl.data.data_source import DataSource
from agentrl.data.mixed_source import MixedSource
from agentrl.errors import RewardFailure, boundary
from agentrl.rollout.failures import CauseTable, FailureMonitor
from agentrl.rollout.rollout import Progress, Rollout, RolloutLimits
from agentrl.run.collector import CollectedEpisodes, Collector, record_order
from agentrl.schedule.pace import BufferFilter, GroupFilter
from agentrl.schedule.pipeline import Taken
from agentrl.types import EpisodeSpec, Group, Trajectory


@dataclass(frozen=True, kw_only=True)
class PlayedGroup:
    """What became of a slot of the window."""

    group: Group | None
    """None: it was lost, or the filter refused every group that was played in this slot"""
    attempts: tuple[Trajectory, ...] = ()
    """every attempt of its episodes, in order"""
    refused: tuple[Trajectory, ...] = ()
    """attempts of the groups that the filter refused"""
    causes: CauseTable = field(default_factory=CauseTable)


@dataclass(frozen=True, kw_only=True)
class StoppedGroups:
    """What became of the groups that a rollout did not wait for."""

    groups: int
    dropped: int
    """groups whose tasks were not given back"""
    unfinished: int
    """episodes that were stopped"""
    attempts: list[Trajectory]
    """attempts of their episodes that had ended"""


class GroupPlayer:
    """Plays the groups of a run in the slots of a window.

    Args:
        source: where the groups come from.
        rollout: plays them; its concurrency is shared by all.
        limits: its limits.
        keep: whether to train on a group; None: on every group.
        max_resamples: groups that are played in place of one that `keep` refuses.
        specs: the groups of slots that were in flight or finished when a run was saved.
    """

    def __init__(
        self,
        source: DataSource | MixedSource,
        rollout: Rollout,
        limits: RolloutLimits,
        *,
        keep: GroupFilter | None = None,
        max_resamples: int = 0,
        specs: Mapping[int, Sequence[EpisodeSpec]] | None = None,
    ) -> None:
        self.source, self.rollout = source, rollout
        self.specs: dict[int, Sequence[EpisodeSpec]] = dict(specs or {})
        """the group of every slot that was not trained on yet"""
        self.restart: Callable[[int], None] = lambda slot: None
        """called when a slot starts again with another group"""
        self._stopped: list[Trajectory] = []
        """attempts of groups that were stopped"""
        self._keep, self._max_resamples = keep, max_resamples
        self._monitor = FailureMonitor(CauseTable(), limits.max_failure_share, limits.concurrency)

    def play(self, slot: int) -> Coroutine[Any, Any, PlayedGroup]:
        """Issue the group of a slot, unless it has one, and return what plays it. Called in order of submission."""
        if slot not in self.specs:
            self.specs[slot] = self.source.get_samples(1)[0]
        return self._play(slot)

    async def _play(self, slot: int) -> PlayedGroup:
        causes = CauseTable()
        refused: list[Trajectory] = []
        for resamples_left in range(self._max_resamples, -1, -1):
            attempts: dict[str, Trajectory] = {}
            try:
                group, table = await self.rollout.play_group(self.specs[slot], self._monitor, _noting(attempts))
            except asyncio.CancelledError:
                self._stopped += [*refused, *sorted(attempts.values(), key=lambda t: (t.index, t.attempt))]
                raise
            causes.merge(table)
            attempts |= {t.episode_id: t for t in (group.trajectories if group else ())}
            played = tuple(sorted(attempts.values(), key=record_order))
            if group is None or self._may_train(group):
                return PlayedGroup(group=group, attempts=played, refused=tuple(refused), causes=causes)
            refused += played
            if resamples_left:
                self.specs[slot] = self.source.get_samples(1)[0]
                self.restart(slot)
        return PlayedGroup(group=None, refused=tuple(refused), causes=causes)

    def _may_train(self, group: Group) -> bool:
        if self._keep is None:
            return True
        with boundary(RewardFailure, "the group filter"):
            return bool(self._keep(group))

    def give_back(
        self, slots: Sequence[int], outcomes: Mapping[int, PlayedGroup], keep: BufferFilter | None
    ) -> StoppedGroups:
        """The groups of these slots were stopped: give their tasks back to the source, or those that `keep` returns.

        Args:
            slots: their slots, which get other groups when they start again.
            outcomes: of those that had finished nevertheless.
            keep: see `--buffer-filter-path`.
        """
        groups = [self.specs.pop(slot) for slot in slots]
        kept: Sequence[Sequence[EpisodeSpec]] = groups
        if keep is not None:
            with boundary(RewardFailure, "the buffer filter"):
                kept = list(keep(list(groups)))
        self.source.add_samples(kept)
        attempts, self._stopped = self._stopped, []
        attempts += chain.from_iterable((*o.attempts, *o.refused) for o in outcomes.values())
        finished = len({t.index for t in attempts})
        episodes = sum(map(len, groups)) - finished
        return StoppedGroups(
            groups=len(groups), dropped=len(groups) - len(kept), unfinished=episodes, attempts=attempts
        )

    async def collect(self, collector: Collector, step: int, taken: Sequence[Taken[PlayedGroup]]) -> CollectedEpisodes:
        """Record the groups of a rollout, in order of submission. The record of an episode holds its slot and its staleness.

        Raises:
            TooManyFailuresError: no group is left.
        """
        causes, violations = CauseTable(), 0
        for t in taken:
            del self.specs[t.slot]
            causes.merge(t.outcome.causes)
            schedule = {"slot": t.slot, "staleness": t.staleness}
            for split, attempts in (("train", t.outcome.attempts), ("filtered", t.outcome.refused)):
                violations += await asyncio.to_thread(collector.record, attempts, step, split, schedule=schedule)
        groups = [t.outcome.group for t in taken if t.outcome.group is not None]
        if not groups:
            self._monitor.check_nothing_left()
        return CollectedEpisodes(groups, causes, violations)


def _noting(attempts: dict[str, Trajectory]) -> Progress:
    """A callback that keeps the last state of each attempt."""

    def note(trajectory: Trajectory) -> None:
        attempts[trajectory.episode_id] = trajectory

    return note


def oldest_version(groups: Sequence[Group]) -> int | None:
    """The version of the weights that sampled the oldest token of the groups; None if nothing was sampled."""
    segments = chain.from_iterable(t.segments for g in groups for t in g.trajectories)
    versions = [s.policy_version for segment in segments for s in segment.spans if s.policy_version is not None]
    return min(versions, default=None)
