"""The learning rate, by step: of `agentrl train` by rollout, of `agentrl sft` by optimizer step.

warm-up          linear over `lr_warmup_rollouts` steps
constant         1
linear, cosine   1 to 0.1, from the end of the warm-up to the end of the run
"""

from __future__ import annotations

import math

from agentrl.config.settings import TrainSettings


def learning_rate(settings: TrainSettings, step: int, steps: int, peak: float | None = None) -> float:
    """The learning rate at `step` of `steps`. `peak`: the rate after the warm-up; None: `lr`."""
    peak = settings.lr if peak is None else peak
    warmup = settings.lr_warmup_rollouts
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    factors = {
        "constant": 1.0,
        "linear": 1 - 0.9 * progress,
        "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
    }
    return peak * factors[settings.lr_decay_style]
