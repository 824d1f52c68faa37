"""The losses, over flat arrays of trained tokens.

Every loss is a plain sum of weight × term over tokens. The weights contain the global denominator; nothing here averages.
With r = exp(log π − log π_old), A the advantage, x = log π_ref − log π:

    surrogate   max(−A r, −A clip(r, 1 − ε, 1 + ε_high))        PPO, Schulman et al. 2017, eq. 7; ε_high > ε: DAPO, Yu et al. 2025, §3.1
    dual clip   where A < 0: min(surrogate, −A c)               Ye et al. 2020 (Mastering complex control in MOBA games), eq. 5
    TIS         surrogate × min(exp(log π_old − log π_rollout), C), detached
                                                                Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy training)
    KL          k1 = −x;  k2 = x²/2;  k3 = eˣ − x − 1           Schulman 2020 (Approximating KL divergence); k3 in GRPO: Shao et al. 2024, eq. 4
                low_var_kl = k3 clipped to [−10, 10]      as slime and verl bound it
    entropy     H = −Σ_v π_v log π_v, of the tempered distribution, subtracted with `entropy_coef`
    sft         −log π
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.train.base import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """Inputs of the loss for each trained token; all tensors have shape [n], fp32 unless noted."""

    weights: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    """0 where the engine did not sample the token"""
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampled: Tensor | None = None
    """[n] bool: where the engine sampled the token; None: everywhere"""


def surrogate(ratio: Tensor, advantages: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """The clipped policy loss per token, and where clipping is active (the gradient is zero there)."""
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - loss.eps_clip, 1 + high)
    value, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    if loss.eps_clip_c is not None:
        bound = -advantages * loss.eps_clip_c
        over = (advantages < 0) & (value > bound)
        value, clipped = torch.where(over, bound, value), clipped | over
    return value, clipped


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """An estimator of KL(π || π_ref) per token, with its plain gradient."""
    x = ref_log_probs - log_probs
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        return x.exp() - x - 1
    if kind == "low_var_kl":
        return (x.exp() - x - 1).clamp(-10, 10)
    raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl; found {kind!r}")


def token_loss(log_probs: Tensor, entropy: Tensor, data: TokenData, loss: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of one micro-batch.

    Args:
        log_probs: [n], of the trained tokens under the current weights, with gradient.
        entropy: [n], of the current distributions at the trained tokens.
        data: the other inputs.
        loss: kind and coefficients.

    Returns:
        The summed loss (scalar, with gradient), and `SUMS` and `MAXIMA` of step_metrics.py (fp64, detached).
    """
    w, current = data.weights, log_probs.detach()
    old = current if data.old_log_probs is None else data.old_log_probs
    ratio, kl, tis = torch.exp(log_probs - old), torch.zeros_like(current), torch.ones_like(current)
    if loss.use_tis:
        tis = torch.exp(old - data.rollout_log_probs).clamp(max=loss.tis_threshold)
    if loss.kind == "sft":
        pg, clipped = -log_probs, torch.zeros_like(current)
        total = (w * pg).sum()
    else:
        pg, clipped = surrogate(ratio, data.advantages, loss)
        total = (w * pg * tis).sum()
        if data.ref_log_probs is not None:
            kl = kl_estimate(log_probs, data.ref_log_probs, loss.kl_loss_type)
            if loss.kl_loss_coef:
                total = total + loss.kl_loss_coef * (w * kl).sum()
        if loss.entropy_coef:
            total = total - loss.entropy_coef * (w * entropy).sum()
    with torch.no_grad():
        trained = w != 0
        sampled = trained if data.sampled is None else trained & data.sampled
        diff = torch.where(sampled, (old - data.rollout_log_probs).abs(), 0.0)
        weighted = [(w * x.detach()).sum(dtype=torch.float64) for x in (pg * tis, kl, entropy, clipped, tis, ratio)]
        counts = [x.sum(dtype=torch.float64) for x in (w, diff, sampled, trained)]
        sums = torch.stack([total.detach().double(), *weighted, *counts])
        maxima = torch.stack([torch.where(trained, x, 0.0).max().double() for x in (diff, ratio, tis)])
    return total, sums, maxima
