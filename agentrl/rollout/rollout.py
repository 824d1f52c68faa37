"""Many episodes: bounded concurrency, retries, groups by id, group rewards, and the table that says what became of everything."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentrl.errors import RewardFailure, TooManyFailuresError
from agentrl.reward import Scorer
from agentrl.types import EpisodeSpec, Group, Status, StopReason, Trajectory

logger = logging.getLogger(__name__)

_SHOWN = 300
"""characters of a failure's detail in the table"""
_FEW = 8
"""lost episodes that stop no rollout of which something is left"""
_WAVES = 2
"""times `concurrency`: more attempts that fail one after another stop it (a server that dies fails all it has, which is one) …"""
_ROW = 16
"""… if they are more than this"""
_GC_OBJECTS = 100_000
"""new objects between two collections while episodes run"""


@dataclass
class CauseTable:
    """Counts by stop reason and cause: the answer to 'why are there no training rows?'"""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    retried: int = 0
    """failed episodes that were run again"""
    dropped_groups: int = 0
    """groups left with fewer than min_group_size members"""
    details: dict[tuple[str, str], str] = field(default_factory=dict)
    """of the first of each: what was raised, and where"""

    def add(self, trajectory: Trajectory) -> None:
        """Count one finished attempt."""
        self.counts[_key(trajectory)] += 1
        self._note(trajectory)
        for turn in trajectory.turns:
            if "new_segment" in turn.info:
                self.counts["(segment opened)", str(turn.info["new_segment"])] += 1

    def recount(self, before: Trajectory, after: Trajectory) -> None:
        """An attempt that was counted turned out otherwise (its group's reward failed): still one attempt."""
        self.counts[_key(before)] -= 1
        self.counts += Counter()  # drops what is at zero
        self.counts[_key(after)] += 1
        self._note(after)

    def _note(self, trajectory: Trajectory) -> None:
        if trajectory.detail and trajectory.detail != trajectory.cause:
            self.details.setdefault(_key(trajectory), trajectory.detail)

    def merge(self, other: CauseTable) -> None:
        """Add another table to this one."""
        self.counts += other.counts
        self.details = other.details | self.details
        self.retried += other.retried
        self.dropped_groups += other.dropped_groups

    @property
    def attempts(self) -> int:
        """All finished attempts."""
        return sum(n for (reason, _), n in self.counts.items() if not reason.startswith("("))

    @property
    def failures(self) -> int:
        """Attempts that failed for reasons of infrastructure."""
        return sum(
            n
            for (reason, _), n in self.counts.items()
            if not reason.startswith("(") and StopReason(reason).status is Status.FAILED
        )

    def by_reason(self) -> dict[str, int]:
        """Counts by stop reason alone."""
        out: Counter[str] = Counter()
        for (reason, _), n in sorted(self.counts.items()):
            if not reason.startswith("("):
                out[reason] += n
        return dict(out)

    @property
    def unremarkable(self) -> bool:
        """Every attempt terminated, and there is nothing else to tell."""
        return not (self.retried or self.dropped_groups) and {r for r, _ in self.counts} <= {
            StopReason.TERMINATED.value
        }

    def rows(self) -> list[tuple[str, str, int]]:
        """(stop reason, cause, count), the most frequent first."""
        return [(*key, n) for key, n in sorted(self.counts.items(), key=lambda kv: (-kv[1], kv[0]))]

    def __str__(self) -> str:
        rows = self.rows()
        width = max([len(reason) for reason, _, _ in rows] + [11])
        lines = [f"{'stop reason':<{width}}  {'count':>7}  cause"]
        for reason, cause, n in rows:
            lines.append(f"{reason:<{width}}  {n:>7}  {cause}")
            if (reason, cause) in self.details:
                text = " ".join(self.details[reason, cause].split())
                lines.append(f"{'':<{width}}  {'':>7}    such as: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}")
        return "\n".join([*lines, f"{self.retried} retried, {self.dropped_groups} groups dropped"])


@dataclass(frozen=True)
class RolloutLimits:
    """How many at once, and how much failure is borne."""

    concurrency: int = 64
    max_retries: int = 2
    """further attempts for an episode whose infrastructure failed"""
    min_group_size: int = 2
    """a group with fewer members left is dropped (groups that were issued smaller excepted)"""
    max_failure_share: float = 0.5
    """of episodes begun, lost after all their attempts; above it the rollout stops, once more than 8 are lost. Attempts are not what is counted:
    one server that dies fails every episode it had, and the next attempts do well. Below 1 the rollout stops also if no group is left, or if
    twice as many attempts as `concurrency` fail one after another"""


Progress = Callable[[Trajectory], None]


class Runner(Protocol):
    """What plays episodes: an EpisodeRunner, or one in other processes (rollout/process_pool.py)."""

    @property
    def scorer(self) -> Scorer:
        """Of whole groups."""

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """Play one episode; see `EpisodeRunner.run`."""


class _Account:
    """Of one rollout under way: what became of attempts and episodes, and how many of these were ordered and have no slot yet."""

    def __init__(self, progress: Progress | None) -> None:
        self.table = CauseTable()
        self.progress: Progress = progress or (lambda trajectory: None)
        self.begun = 0
        self.lost = 0
        """of those begun, failed in every attempt"""
        self.in_a_row = 0
        """attempts that failed since the last that did not"""
        self.stopped: TooManyFailuresError | None = None
        """what stops the run; more attempts may fail in the same moment, and it is the first that is told"""
        self._waiting = 0
        self._begun = asyncio.Event()

    async def order(self, count: int, most: int) -> None:
        """Count so many more, once fewer than `most` wait: what lies further on need not exist yet."""
        while self._waiting >= most:
            self._begun.clear()
            await self._begun.wait()
        self._waiting += count

    def begin(self) -> None:
        """One of them has its slot."""
        self.begun += 1
        self._waiting -= 1
        self._begun.set()


class Rollout:
    """Runs groups of episodes on one runner."""

    def __init__(self, runner: Runner, limits: RolloutLimits) -> None:
        self.runner = runner
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def run(
        self, groups: Iterable[Sequence[EpisodeSpec]], progress: Progress | None = None
    ) -> tuple[list[Group], CauseTable]:
        """Run all groups; returns those that stand, in order, and the table. `progress` hears of every finished attempt, and
        again of those whose group's reward failed. `groups` is gone through as places become free.

        Raises:
            TooManyFailuresError: more than `max_failure_share` of the episodes were lost, or nothing works (see `RolloutLimits`).
            UsageError: user code broke its contract; every other episode is closed first.
        """
        account = _Account(progress)
        running: list[asyncio.Task[Group | None]] = []
        try:
            with fewer_collections:
                async with asyncio.TaskGroup() as tasks:
                    for specs in groups:
                        await account.order(len(specs), self.limits.concurrency)
                        running.append(tasks.create_task(self._group(specs, account)))
        except ExceptionGroup as e:
            raise _first(e) from None  # the first error alone, not a group of what followed from it
        done = [g for t in running if (g := t.result()) is not None]
        if not done and account.lost and self.limits.max_failure_share < 1:
            raise _too_many(account, "and no group is left")
        return done, account.table

    async def _group(self, specs: Sequence[EpisodeSpec], account: _Account) -> Group | None:
        async with (
            asyncio.TaskGroup() as tasks
        ):  # if one raises, the others are cancelled, and closed before the error goes on
            members = [tasks.create_task(self._episode(s, account)) for s in specs]
        kept = [t for m in members if (t := m.result()) is not None]
        if len(kept) < min(self.limits.min_group_size, len(specs)):
            account.table.dropped_groups += 1
            return None
        scored = await self._score(kept, account)
        return Group(specs[0].group_index, specs[0].task, tuple(scored)) if scored else None

    async def _score(self, members: list[Trajectory], account: _Account) -> list[Trajectory] | None:
        """The members with their group rewards, tried as often as an episode is; None if the group is lost."""
        for attempt in range(self.limits.max_retries + 1):
            try:
                return await self.runner.scorer.score_group(members)
            except RewardFailure as e:
                if attempt < self.limits.max_retries:
                    continue
                for t in members:
                    lost = replace(t, stop_reason=StopReason.REWARD_FAILURE, cause=e.cause, detail=str(e))
                    account.table.recount(t, lost)
                    account.progress(lost)
        account.table.dropped_groups += 1
        self._check(account, lost=len(members))
        return None

    async def _episode(self, spec: EpisodeSpec, account: _Account) -> Trajectory | None:
        """One episode with its retries, each behind those that wait; None if it is lost."""
        first = True
        while True:
            async with self._slots:
                if first:
                    account.begin()
                    first = False
                trajectory = await self.runner.run(spec)
            account.table.add(trajectory)
            account.progress(trajectory)
            if trajectory.status not in (Status.FAILED, Status.ABORTED):
                account.in_a_row = 0
                return trajectory
            account.in_a_row += 1
            last = spec.attempt >= self.limits.max_retries
            _log_failure(trajectory, account.table, retried=not last)
            self._check(account, lost=int(last))
            if last:
                return None
            account.table.retried += 1
            spec = replace(spec, attempt=spec.attempt + 1)

    def _check(self, account: _Account, lost: int) -> None:
        """After an attempt that failed: `lost` more episodes have no further one."""
        account.lost += lost
        share = self.limits.max_failure_share
        if account.lost > _FEW and account.lost > share * account.begun:
            raise _too_many(account, f"more than max_failure_share {share:g} allows")
        if share < 1 and account.in_a_row > max(_ROW, _WAVES * self.limits.concurrency):
            raise _too_many(account, f"the last {account.in_a_row} of them one after another")


def _log_failure(trajectory: Trajectory, table: CauseTable, *, retried: bool) -> None:
    """A warning for the first failure of each cause in a rollout; the others, which may be as many as there are episodes, for information."""
    logger.log(
        logging.WARNING if table.counts[_key(trajectory)] == 1 else logging.INFO,
        "episode %s, attempt %d: %s: %s; %s",
        trajectory.episode_id,
        trajectory.attempt,
        trajectory.stop_reason.value,
        trajectory.detail or trajectory.cause,
        "retried" if retried else "lost",
    )


def _too_many(account: _Account, why: str) -> TooManyFailuresError:
    table = account.table
    account.stopped = account.stopped or TooManyFailuresError(
        f"{account.lost} of {account.begun} episodes were lost ({table.failures} of {table.attempts} attempts failed), {why}; the causes:\n{table}"
    )
    return account.stopped


class _FewerCollections:
    """Episodes make many objects that live long and hardly a cycle; by its usual thresholds the collector goes through them again and again.

    A `with` block; the thresholds come back when the last of several rollouts ends.
    """

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._rollouts = 0

    def __enter__(self) -> None:
        self._rollouts += 1
        if self._rollouts == 1:
            self._before = gc.get_threshold()
            if self._before[0]:
                gc.set_threshold(max(self._before[0], _GC_OBJECTS), *self._before[1:])

    def __exit__(self, *_: object) -> None:
        self._rollouts -= 1
        if not self._rollouts:
            gc.set_threshold(*self._before)


fewer_collections = _FewerCollections()


def _key(t: Trajectory) -> tuple[str, str]:
    return t.stop_reason.value, t.cause or ""


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
