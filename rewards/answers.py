"""Rewards of question answering: exact match and F1 of the trajectory's final answer against its accepted answers (the label)."""

from __future__ import annotations

from agentrl.core.timeout_pool import pure
from agentrl.reward import reward
from agentrl.rewards import qa
from agentrl.types import Trajectory


@reward(name="em")
@pure
def em(trajectory: Trajectory) -> float:
    """1.0 if the final answer equals an accepted one after normalisation, else 0.0; no answer is 0.0."""
    return qa.exact_match(trajectory.answer, trajectory.label)


@reward(name="f1", weight=0.0)
@pure
def f1(trajectory: Trajectory) -> float:
    """Best token F1 against the accepted answers; reported, not part of the score (weight 0)."""
    return qa.f1(trajectory.answer, trajectory.label)
