"""From scores to advantages, by group id. An advantage belongs to an episode; all its segments share it, once.

grpo: Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), §4.1.2: (r - mean) / std of the group (std with n - 1, as torch's).
dr_grpo: Liu et al. 2025 (arXiv:2503.20783), §3.2: r - mean, no division by the std.
rloo: Ahmadian et al. 2024 (arXiv:2402.14740), §2: r minus the mean of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agentrl.errors import UnknownNameError
from agentrl.types import Group, Status, StopReason, Trajectory

EQUAL = 1e-6
"""rewards of a group that differ by less are equal: nothing to learn from them"""


def _grpo(scores: Sequence[float]) -> list[float]:
    mean = math.fsum(scores) / len(scores)
    std = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
    return [(s - mean) / (std + 1e-6) for s in scores]


def _dr_grpo(scores: Sequence[float]) -> list[float]:
    mean = math.fsum(scores) / len(scores)
    return [s - mean for s in scores]


def _rloo(scores: Sequence[float]) -> list[float]:
    total, n = math.fsum(scores), len(scores)
    return [s - (total - s) / (n - 1) for s in scores]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}
"""Each takes the scores (two or more, not all equal) of a group's baseline members and gives their advantages."""

TRUNCATED = ("train", "mask", "drop")
"""what to do with MAX_TURNS, MAX_TOKENS, CONTEXT_FULL, ENV_TRUNCATED: train on them, mask their tokens, or leave them out of the baseline too"""


def group_advantages(groups: Sequence[Group], estimator: str = "grpo", truncated: str = "train") -> dict[str, float]:
    """Advantage by episode_id, for the episodes that are trained on. Groups of one (or all-equal) have advantage 0.

    Raises:
        UnknownNameError: no such estimator.
    """
    if estimator not in ESTIMATORS:
        raise UnknownNameError.of("advantage estimator", estimator, ESTIMATORS)
    out: dict[str, float] = {}
    for group in groups:
        members = [t for t in group.trajectories if in_baseline(t, truncated)]
        scores = [t.score for t in members]
        flat = len(scores) < 2 or max(scores) - min(scores) < EQUAL
        values = [0.0] * len(scores) if flat else ESTIMATORS[estimator](scores)
        out.update((t.episode_id, a) for t, a in zip(members, values, strict=True) if is_trained(t, truncated))
    return out


def in_baseline(t: Trajectory, truncated: str) -> bool:
    """Does it count in the group's baseline? (design §6)"""
    if t.stop_reason is StopReason.EPISODE_TIMEOUT:
        return False
    return t.status is Status.COMPLETED or (t.status is Status.TRUNCATED and truncated != "drop")


def is_trained(t: Trajectory, truncated: str) -> bool:
    """Are its sampled tokens trained on? (design §6)"""
    return in_baseline(t, truncated) and (t.status is Status.COMPLETED or truncated == "train")
