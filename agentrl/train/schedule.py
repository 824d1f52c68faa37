"""Learning rates of RL and of supervised fine-tuning, by step.

                 RL (`rollout_learning_rate`)          SFT (`sft_learning_rate`)
step             rollout                               optimizer step
warm-up          linear over `lr_warmup_rollouts`      linear over `lr_warmup_rollouts` steps
decay begins     after the warm-up                     at step 0, multiplied with the warm-up
constant         1                                     1
linear           1 to 0.1                              1 to 0.05
cosine           1 to 0.1                              the same as linear

The two schedules differ in the unit of a step, in the decay and in its floor.
"""

from __future__ import annotations

import math

from agentrl.config import Config


def rollout_learning_rate(config: Config, step: int, peak: float | None = None) -> float:
    """The learning rate of all optimizer steps after rollout `step`. `peak`: the rate after the warm-up; None: `lr`."""
    settings, total = config.train, config.rollout.num_rollout
    peak = settings.lr if peak is None else peak
    warmup = settings.lr_warmup_rollouts
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    factors = {
        "constant": 1.0,
        "linear": 1 - 0.9 * progress,
        "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
    }
    return peak * factors[settings.lr_decay_style]


def sft_learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step` of `steps`."""
    settings = config.train
    warmup = min(1.0, (step + 1) / max(1, settings.lr_warmup_rollouts))
    decay = 1.0 if settings.lr_decay_style == "constant" else max(0.05, 1 - step / steps)
    return settings.lr * warmup * decay
