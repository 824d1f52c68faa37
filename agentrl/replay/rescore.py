"""Rescore: new or changed rewards on recorded episodes, and their effect on means, ranks within groups and signs of advantages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from agentrl.errors import RewardFailure
from agentrl.reward import Scorer, component_means
from agentrl.train.advantage import EQUAL, group_advantages
from agentrl.types import Group, Status, StopReason, Trajectory, by_role


@dataclass(frozen=True, slots=True)
class Rescored:
    """The members of one group before and after, in the same order, without episodes that failed."""

    then: tuple[Trajectory, ...]
    today: tuple[Trajectory, ...]


async def rescore_group(scorer: Scorer, members: Sequence[Trajectory]) -> Rescored:
    """Score the members of a group again. An episode whose reward fails becomes a failure, as in a run."""
    then = tuple(
        t
        for t in members
        if t.status not in (Status.FAILED, Status.ABORTED) or t.stop_reason is StopReason.REWARD_FAILURE
    )
    today: list[Trajectory] = []
    for t in then:
        bare = replace(t, rewards={}, weights={})
        try:
            today.append(await scorer.score(bare))
        except RewardFailure as e:
            today.append(replace(bare, stop_reason=StopReason.REWARD_FAILURE, cause=e.cause))
    scored = [i for i, t in enumerate(today) if t.stop_reason is not StopReason.REWARD_FAILURE]
    try:
        for i, t in zip(scored, await scorer.score_group([today[i] for i in scored]), strict=True):
            today[i] = t
    except RewardFailure as e:
        for i in scored:
            today[i] = replace(today[i], stop_reason=StopReason.REWARD_FAILURE, cause=e.cause)
    return Rescored(then, tuple(today))


@dataclass
class Change:
    """The effect of other rewards, over all groups."""

    estimator: str = "grpo"
    truncated: str = "train"
    then: list[Trajectory] = field(default_factory=list)
    today: list[Trajectory] = field(default_factory=list)
    groups: int = 0
    pairs: int = 0
    """pairs of members of one group"""
    swapped: int = 0
    """pairs whose order changes, also from equal to unequal or back"""
    reversed: int = 0
    """pairs whose better member becomes the worse one"""
    flipped: list[tuple[int, str, float, float]] = field(default_factory=list)
    """(group, episode, advantage then, advantage today) where the sign flips"""
    failures: list[Trajectory] = field(default_factory=list)

    def add(self, groups: Iterable[Rescored]) -> None:
        for g in groups:
            self.groups += 1
            self.failures += [t for t in g.today if t.status is Status.FAILED]
            both = [(a, b) for a, b in zip(g.then, g.today, strict=True) if Status.FAILED not in (a.status, b.status)]
            self.then += [a for a, _ in both]
            self.today += [b for _, b in both]
            for then, today in zip(by_role([a for a, _ in both]), by_role([b for _, b in both]), strict=True):
                self._compare(list(zip(then, today, strict=True)))
            self._flips([a for a, _ in both], [b for _, b in both])

    def _compare(self, both: Sequence[tuple[Trajectory, Trajectory]]) -> None:
        """Count the pairs of compared members whose order changes."""
        for (a, b), (c, d) in combinations(both, 2):
            before, after = _order(a.score, c.score), _order(b.score, d.score)
            self.pairs += 1
            self.swapped += before != after
            self.reversed += before * after < 0

    def _flips(self, then: Sequence[Trajectory], today: Sequence[Trajectory]) -> None:
        if not then:
            return
        sides = [Group(side[0].group_index, side[0].task, tuple(side)) for side in (then, today)]
        before, after = (group_advantages([g], self.estimator, self.truncated) for g in sides)
        for t in (side for part in by_role(then) for side in part):
            a, b = before.get(t.episode_id, 0.0), after.get(t.episode_id, 0.0)
            if a * b < 0:
                self.flipped.append((t.group_index, t.episode_id, a, b))

    @property
    def flipped_groups(self) -> int:
        """Groups in which an advantage changes its sign."""
        return len({g for g, *_ in self.flipped})

    @property
    def changed(self) -> int:
        """Episodes whose score changes."""
        return sum(abs(a.score - b.score) >= EQUAL for a, b in zip(self.then, self.today, strict=True))

    def means(self) -> list[tuple[str, float | None, float | None]]:
        """(component, then, today), the score last; empty if nothing could be scored."""
        if not self.today:
            return []
        before, after = component_means(self.then), component_means(self.today)
        rows = [(name, before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))]
        return [*rows, ("score", fmean(t.score for t in self.then), fmean(t.score for t in self.today))]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for the page."""
        counts = {n: getattr(self, n) for n in ("groups", "changed", "pairs", "swapped", "reversed", "flipped_groups")}
        failed = [(t.episode_id, t.cause) for t in self.failures]
        more = {"estimator": self.estimator, "episodes": len(self.today), "failed": failed}
        return {**counts, **more, "means": self.means(), "flipped": self.flipped, "text": str(self)}

    def __str__(self) -> str:
        if not self.today:
            return f"no episode could be scored; {len(self.failures)} rewards failed"
        rows = self.means()
        width = max(len(r[0]) for r in rows)
        lines = [
            f"{len(self.today)} episodes in {self.groups} groups",
            "",
            f"{'mean of':<{width}}  {'recorded':>9}  {'now':>9}  {'change':>9}",
        ]
        lines += [
            f"{n:<{width}}  {_number(a)}  {_number(b)}  {_number(None if a is None or b is None else b - a, '+')}"
            for n, a, b in rows
        ]
        lines += ["", f"scores that change: {self.changed} of {len(self.today)}"]
        pairs = f"{self.swapped} of {self.pairs}, {self.reversed} of them reversed"
        lines.append(f"pairs within a group whose order changes: {pairs}")
        groups = f"{self.flipped_groups} of {self.groups} ({len(self.flipped)} episodes)"
        lines.append(f"groups in which an advantage ({self.estimator}) changes its sign: {groups}")
        lines += [f"  group {g}, episode {e}: {a:+.3f} -> {b:+.3f}" for g, e, a, b in self.flipped[:10]]
        lines += ["  …"] if len(self.flipped) > 10 else []
        if self.failures:
            first = f"the first in episode {self.failures[0].episode_id}: {self.failures[0].cause}"
            lines.append(f"rewards that failed: {len(self.failures)}, {first}")
        return "\n".join(lines)


def _order(a: float, b: float) -> int:
    return 0 if abs(a - b) < EQUAL else 1 if a > b else -1


def _number(value: float | None, sign: str = "") -> str:
    return f"{'-':>9}" if value is None else f"{value:>{sign}9.4f}"
