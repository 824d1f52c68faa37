"""Rewards of form: whether the policy's turns can be parsed, and whether they match a pattern."""

from __future__ import annotations

import re

from agentrl.core.timeout_pool import pure
from agentrl.errors import ContractError
from agentrl.reward import Reward, reward
from agentrl.types import Trajectory


@reward(name="well_formed")
@pure
def well_formed(trajectory: Trajectory) -> float:
    """Return the share of turns whose action was parsed without an error; 0.0 without turns."""
    turns = trajectory.turns
    return sum(not t.action.errors for t in turns) / len(turns) if turns else 0.0


def matches(pattern: str, *, name: str = "format", weight: float = 1.0) -> Reward:
    """A reward of 1.0 if the text of every turn matches a regular expression as a whole (`.` matches line ends too), else 0.0.

    Raises:
        ContractError: the pattern is not a regular expression.

    Example:
        >>> thinks = matches(r"<think>.+</think>.+", name="thinks", weight=0.1)
        >>> thinks.name, thinks.weight
        ('thinks', 0.1)
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as e:
        raise ContractError(f"reward {name}: {pattern!r} is not a regular expression: {e}") from e

    def format_reward(trajectory: Trajectory) -> float:
        turns = trajectory.turns
        return float(bool(turns) and all(compiled.fullmatch(t.action.text.strip()) for t in turns))

    return Reward(format_reward, name, weight)
