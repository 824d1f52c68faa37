"""Failures in a rollout: the table of causes, and when too many episodes are lost to continue."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentrl.errors import TooManyFailuresError
from agentrl.types import Status, StopReason, Trajectory

MAX_DETAIL_CHARS = 300
"""characters of a failure's detail in the printed table"""
MIN_LOST = 8
"""a rollout with at most this many lost episodes continues, if any group is left"""
MIN_CONSECUTIVE = 16
"""a rollout with at most this many consecutive failed attempts continues"""
CONSECUTIVE_PER_SLOT = 2
"""consecutive failed attempts that are tolerated per concurrent episode; a server that dies fails one per slot"""


_LIMITS = tuple(
    reason.value
    for reason in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.ENV_TRUNCATED)
)
"""limits of turns, tokens and context; an episode that reaches one is no failure"""


@dataclass
class CauseTable:
    """Counts of attempts by stop reason and cause. It answers 'why are there no training rows?'."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """by (stop reason, cause); rows in parentheses, such as '(segment opened)', are events and not attempts"""
    retried: int = 0
    """failed episodes that were started again"""
    dropped_groups: int = 0
    """groups that ended with fewer than min_group_size members"""
    details: dict[tuple[str, str], str] = field(default_factory=dict)
    """the first error message of each row"""

    def add(self, trajectory: Trajectory) -> None:
        """Count one finished attempt."""
        self.counts[_key(trajectory)] += 1
        self._add_detail(trajectory)
        for turn in trajectory.turns:
            if "new_segment" in turn.info:
                self.counts["(segment opened)", str(turn.info["new_segment"])] += 1

    def recount(self, before: Trajectory, after: Trajectory) -> None:
        """Move an attempt to another row, after its group's reward failed."""
        self.counts[_key(before)] -= 1
        self.counts += Counter()  # drops rows at zero
        self.counts[_key(after)] += 1
        self._add_detail(after)

    def _add_detail(self, trajectory: Trajectory) -> None:
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
        """Number of finished attempts."""
        return sum(self.by_reason().values())

    @property
    def failures(self) -> int:
        """Number of attempts that ended in a failure of infrastructure."""
        return sum(n for reason, n in self.by_reason().items() if StopReason(reason).status is Status.FAILED)

    def by_reason(self) -> dict[str, int]:
        """Attempts by stop reason."""
        totals: Counter[str] = Counter()
        for (reason, _), count in sorted(self.counts.items()):
            if not reason.startswith("("):
                totals[reason] += count
        return dict(totals)

    @property
    def needs_attention(self) -> bool:
        """True if something failed, was retried, timed out or was dropped, or if more than half of the attempts were cut by a limit."""
        reasons = self.by_reason()
        benign = {StopReason.TERMINATED.value, *_LIMITS}
        cut = sum(reasons.get(reason, 0) for reason in _LIMITS)
        return bool(self.retried or self.dropped_groups or reasons.keys() - benign) or 2 * cut > self.attempts

    def rows(self) -> list[tuple[str, str, int]]:
        """(stop reason, cause, count), the most frequent first."""
        return [(*key, n) for key, n in sorted(self.counts.items(), key=lambda kv: (-kv[1], kv[0]))]

    def __str__(self) -> str:
        rows = self.rows()
        width = max([len(reason) for reason, _, _ in rows] + [11])
        lines = [f"{'stop reason':<{width}}  {'count':>7}  cause"]
        for reason, cause, count in rows:
            lines.append(f"{reason:<{width}}  {count:>7}  {cause}")
            if (reason, cause) in self.details:
                text = " ".join(self.details[reason, cause].split())
                if len(text) > MAX_DETAIL_CHARS:
                    text = text[:MAX_DETAIL_CHARS] + "…"
                lines.append(f"{'':<{width}}  {'':>7}    such as: {text}")
        return "\n".join([*lines, f"{self.retried} retried, {self.dropped_groups} groups dropped"])


class FailureMonitor:
    """Counts the failures of one rollout and raises when they exceed its limits.

    Args:
        table: the rollout's table, for the message.
        max_share: see `RolloutLimits.max_failure_share`.
        concurrency: episodes at the same time.
    """

    def __init__(self, table: CauseTable, max_share: float, concurrency: int) -> None:
        self.table = table
        self.max_share = max_share
        self.max_consecutive = max(MIN_CONSECUTIVE, CONSECUTIVE_PER_SLOT * concurrency)
        self.begun = 0
        """episodes"""
        self.lost = 0
        """episodes that failed in every attempt"""
        self.consecutive = 0
        """attempts that failed since the last that did not"""
        self._error: TooManyFailuresError | None = None

    def succeeded(self) -> None:
        """Note an attempt that did not fail."""
        self.consecutive = 0

    def failed(self, *, lost: bool) -> None:
        """Note a failed attempt; `lost`: it was the episode's last.

        Raises:
            TooManyFailuresError: the rollout should stop.
        """
        self.consecutive += 1
        self.add_lost(int(lost))

    def add_lost(self, episodes: int) -> None:
        """Note lost episodes; raises as `failed` does."""
        self.lost += episodes
        if self.lost > MIN_LOST and self.lost > self.max_share * self.begun:
            raise self._too_many(f"more than max_failure_share {self.max_share:g} allows")
        if self.max_share < 1 and self.consecutive > self.max_consecutive:
            raise self._too_many(f"the last {self.consecutive} of them consecutively")

    def check_nothing_left(self) -> None:
        """Call when no group is left; raises as `failed` does if episodes were lost."""
        if self.lost and self.max_share < 1:
            raise self._too_many("and no group is left")

    def _too_many(self, why: str) -> TooManyFailuresError:
        """The first such error: more attempts may fail while the rollout stops."""
        self._error = self._error or TooManyFailuresError(
            f"{self.lost} of {self.begun} episodes were lost "
            f"({self.table.failures} of {self.table.attempts} attempts failed), {why}; the causes:\n{self.table}"
        )
        return self._error


def _key(trajectory: Trajectory) -> tuple[str, str]:
    return trajectory.stop_reason.value, trajectory.cause or ""
