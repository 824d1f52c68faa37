"""Advantages from the scores of a group.

grpo       (r − mean) / std, std with n − 1    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), §4.1.2
dr_grpo    r − mean                            Liu et al. 2025 (arXiv:2503.20783), §3.2
rloo       r − mean of the others              Ahmadian et al. 2024 (arXiv:2402.14740), §2

An advantage belongs to an episode; all its segments share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from agentrl.errors import DataError, UnknownNameError
from agentrl.types import Group, Status, StopReason, Trajectory

_MAX_SCORE = 1e36
"""The sum of many rewards of the largest size (see `real_number`); float32 ends at 3e38."""
EQUAL = 1e-6
"""Scores that differ by less are equal. A group of equal scores has advantage 0."""


def _grpo(scores: Sequence[float]) -> list[float]:
    mean = math.fsum(scores) / len(scores)
    std = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
    return [(s - mean) / (std + 1e-6) for s in scores]


def _dr_grpo(scores: Sequence[float]) -> list[float]:
    mean = math.fsum(scores) / len(scores)
    return [s - mean for s in scores]


def _rloo(scores: Sequence[float]) -> list[float]:
    total, others = math.fsum(scores), len(scores) - 1
    return [s - (total - s) / others for s in scores]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}
"""Advantage estimators by name. Each takes two or more scores that are not all equal."""


def group_advantages(
    groups: Sequence[Group | Sequence[Trajectory]], estimator: str = "grpo", truncated: str = "train"
) -> dict[str, float]:
    """Advantages by episode id of the episodes that are trained on; 0 in a group of one or of equal scores.

    Args:
        groups: each a `Group`, or a list of the trajectories of one task.
        estimator: a name of `ESTIMATORS`.
        truncated: the treatment of truncated episodes; 'train': as complete ones; 'mask': in the baseline, but not trained on; 'drop': neither.

    Raises:
        UnknownNameError: unknown estimator.
        DataError: a score that is not finite, or too large for float32.
    """
    if estimator not in ESTIMATORS:
        raise UnknownNameError.of("advantage estimator", estimator, ESTIMATORS)
    advantages: dict[str, float] = {}
    for group in groups:
        trajectories = group.trajectories if isinstance(group, Group) else group
        members = [t for t in trajectories if in_baseline(t, truncated)]
        scores = [_score(t) for t in members]
        flat = len(scores) < 2 or max(scores) - min(scores) < EQUAL
        values = [0.0] * len(scores) if flat else ESTIMATORS[estimator](scores)
        for trajectory, value in zip(members, values, strict=True):
            if is_trained(trajectory, truncated):
                advantages[trajectory.episode_id] = value
    return advantages


def normalized(advantages: Mapping[str, float], tokens: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Advantages minus their mean over trained tokens, divided by their standard deviation.

    Â = (A − μ) / √(σ² + 10⁻⁸), with μ and σ² (n − 1) over all trained tokens of a rollout: the masked whitening of slime's and verl's
    --normalize-advantages.

    Args:
        advantages: by episode id.
        tokens: (episode id, number of trained tokens) of each sample.

    Returns:
        The normalised advantages by episode id; all 0 where they are equal or there is one trained token.
    """
    weighted = [(advantages[episode], count) for episode, count in tokens if episode in advantages]
    total = sum(count for _, count in weighted)
    if total < 2:
        return dict.fromkeys(advantages, 0.0)
    mean = math.fsum(value * count for value, count in weighted) / total
    variance = math.fsum(count * (value - mean) ** 2 for value, count in weighted) / (total - 1)
    return {episode: (value - mean) / math.sqrt(variance + 1e-8) for episode, value in advantages.items()}


def _score(trajectory: Trajectory) -> float:
    try:
        score = trajectory.score
    except OverflowError:
        score = math.inf
    if not abs(score) <= _MAX_SCORE:
        raise DataError(
            f"episode {trajectory.episode_id} scored {score:g}; a score must be finite and at most {_MAX_SCORE:g}: check its rewards and weights"
        )
    return score


def in_baseline(trajectory: Trajectory, truncated: str) -> bool:
    """Whether the episode's score is part of its group's baseline."""
    if trajectory.stop_reason is StopReason.EPISODE_TIMEOUT:
        return False
    status = trajectory.status
    return status is Status.COMPLETED or (status is Status.TRUNCATED and truncated != "drop")


def is_trained(trajectory: Trajectory, truncated: str) -> bool:
    """Whether the episode's sampled tokens are trained on."""
    return in_baseline(trajectory, truncated) and (trajectory.status is Status.COMPLETED or truncated == "train")
