"""Whether a final answer equals the label as mathematics, by the package `math-verify` (extra `math`)."""

from __future__ import annotations

import re
from typing import Any

from agentrl.errors import ConfigError
from agentrl.reward import reward
from agentrl.types import Trajectory

try:
    from math_verify import parse, verify
except ModuleNotFoundError as e:  # here, so that it is reported when the reward is named, before anything starts
    raise ConfigError(
        "the reward math needs the package math-verify; install it with: pip install 'agentrl[math]'"
    ) from e

_PROSE = re.compile(r"\$|\\boxed|(?<![\\A-Za-z])[A-Za-z]{3,}")
"""what shows that a text is more than one formula: dollar signs, a box, a word that is not a command of LaTeX"""


@reward(name="math")
def math_correct(trajectory: Trajectory) -> float:
    r"""Return 1.0 if the answer equals the label (or one of several) as mathematics: `0.5` and `\frac{1}{2}`, `{1, 2}` and `{2, 1}`.

    The answer is what the action format parses; without one, the text of the last turn, in which `\boxed{…}` takes precedence.
    """
    text = trajectory.answer
    if text is None and trajectory.turns:
        text = trajectory.turns[-1].action.text
    label = trajectory.label
    golden = label if isinstance(label, (list, tuple)) else [label]
    return float(text is not None and any(equal(str(gold), text) for gold in golden))


def equal(gold: str, answer: str) -> bool:
    """Whether two texts are the same value. LaTeX needs no dollar signs."""

    def values(text: str) -> list[Any]:
        # its own limits of time use signals, which only a main thread gets; the reward has one
        found: list[Any] = []
        if not _PROSE.search(text):
            found = parse(f"${text}$", parsing_timeout=None)
        return found or list(parse(text, parsing_timeout=None))

    return bool(verify(values(gold), values(answer), timeout_seconds=None))
