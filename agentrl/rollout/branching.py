"""Branching rollouts: which turns of an episode are played again by siblings, and the specs of these branches.

A branch repeats its parent's turns before the branching turn by verified replay (replay/branch.py) and samples from that turn on. Branches are
not branched again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.types import EpisodeSpec, Provenance, Status, StopReason, Trajectory

if TYPE_CHECKING:
    from agentrl.rollout.episode import EpisodeRunner

ENTROPY = "entropy"
"""value of --branch-at: the turn with the largest mean −log p of its sampled tokens, an unbiased estimate of the policy's mean entropy"""
LEFT_RECORD = "the environment did not repeat the recorded turns"
"""cause of a branch whose environment, played again with the same seed and actions, differs from the record before the branching turn"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSpec(EpisodeSpec):
    """A branch to play. It has the index, the attempt and the seeds of its parent."""

    parent: Trajectory
    turn: int
    """the first turn that is sampled again"""
    number: int
    """of the branch among those of its turn"""
    retry: int = 0
    """number of retries so far; another one samples with another seed"""

    def retried(self, retry: int) -> BranchSpec:
        """The same branch, sampled again after `retry` failures."""
        return replace(self, retry=retry, prefix=_prefix(self.turn, self.number, retry))


def _prefix(turn: int, number: int, retry: int = 0) -> str:
    """Begins the episode id of a branch: 'branch/TURN.NUMBER/', and '-RETRY' after the number of a retry."""
    return f"branch/{turn}.{number}{f'-{retry}' if retry else ''}/"


def several_roles(env: str) -> str:
    """Why an environment of several roles has no branches."""
    return f"{env} has several roles, whose episodes cannot be branched; leave out --branch-at"


PlayBranch = Callable[["EpisodeRunner", BranchSpec], Awaitable[Trajectory]]


@dataclass(frozen=True, slots=True)
class BranchRule:
    """Where the episodes of a rollout are branched."""

    turns: tuple[int, ...] = ()
    """branching turns, ascending; (): the turn of the highest entropy"""
    samples: int = 1
    """branches at each of these turns"""

    @classmethod
    def of(cls, branch_at: Sequence[str], samples: int) -> BranchRule | None:
        """The rule of --branch-at, as checked by the settings; None: no branches."""
        if not branch_at:
            return None
        return cls(() if ENTROPY in branch_at else tuple(sorted(map(int, branch_at))), samples)

    def branches(self, spec: EpisodeSpec, parent: Trajectory) -> list[BranchSpec]:
        """The branches of an episode; none if it failed or timed out. Turns that it did not reach are left out."""
        if (
            parent.status not in (Status.COMPLETED, Status.TRUNCATED)
            or parent.stop_reason is StopReason.EPISODE_TIMEOUT
        ):
            return []
        if any(turn.agent_id != "policy" for turn in parent.turns):
            raise ConfigError(several_roles(parent.env))
        turns = self.turns or _turn_of_highest_entropy(parent)
        return [
            BranchSpec(
                parent.task,
                parent.group_index,
                parent.index,
                parent.attempt,
                _prefix(turn, number),
                spec.env,
                parent=parent,
                turn=turn,
                number=number,
            )
            for turn in turns
            if turn < len(parent.turns)
            for number in range(self.samples)
        ]


def _turn_of_highest_entropy(parent: Trajectory) -> list[int]:
    """The turn after the first whose sampled tokens have the largest mean −log p; the earliest of equal ones."""
    means: dict[int, list[float]] = {}
    for segment in parent.segments:
        for span in segment.spans:
            if span.provenance is Provenance.SAMPLED and span.turn > 0:
                means.setdefault(span.turn, []).extend(span.log_probs or ())
    return [min(means, key=lambda turn: (fmean(means[turn]), turn))] if means else []
