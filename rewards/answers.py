"""Rewards of question answering: exact match and F1 of the final answer against the accepted answers (the label)."""

from __future__ import annotations

from agentrl.core.timeout_pool import pure
from agentrl.reward import reward
from agentrl.rewards import qa
from agentrl.types import Trajectory


@reward(name="em")
@pure
def em(trajectory: Trajectory) -> float:
    """Return 1.0 if the final answer equals an accepted one after normalization, else 0.0. A missing answer scores 0.0."""
    return qa.exact_match(trajectory.answer, trajectory.label)


@reward(name="f1", weight=0.0)
@pure
def f1(trajectory: Trajectory) -> float:
    """Return the best token F1 against the accepted answers. It has weight 0: it is reported, but not part of the score."""
    return qa.f1(trajectory.answer, trajectory.label)
