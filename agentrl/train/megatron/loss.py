"""The losses, over flat arrays of trained tokens.

Every loss is a plain sum of weight × term over tokens. The weights contain the global denominator; nothing here averages.
With r = exp(log π − log π_old), A the advantage, x = log π_ref − log π:

    clip        max(−A r, −A clip(r, 1 − ε, 1 + ε_high))        PPO [1] eq. 7; ε_high > ε: DAPO [2] §3.1
    sequence    clip, with r = s · π / sg π and s the geometric mean of π / π_old over the episode's trained tokens, detached
                                                                GSPO [3] eq. 5, 7 and 11
    cispo       −A sg[clip(r, 1 − ε, 1 + ε_high)] log π         CISPO [4] eq. 4 and 5
    dual clip   where A < 0: min(loss, −A c)                    [5] eq. 5
    importance  loss × w, detached, w = exp(log π_old − log π_rollout) of the token, or multiplied over its turn or episode
      truncate  w := clip(w, low, C)                            TIS [6]
      mask      w := w if low ≤ w ≤ C else 0                    low = 0: MIS [7]; low > 0: IcePop [8]
    proximal    log π_old := log π_rollout + α (sg log π − log π_rollout)
                                                                decoupled PPO [9] eq. 2, interpolated as in AReaL
    KL          k1 = −x;  k2 = x²/2;  k3 = eˣ − x − 1           [10]; k3 in GRPO [11] eq. 4
      low_var_kl  k3 with x in [−20, 20] and the result in [−10, 10], the bounds of verl
      unbiased  r × KL                                          [12] §3.1
    value       ½ max((V − R)², (clip(V, V_old ± ε) − R)²)      the code of PPO [1]; [13]
    entropy     H = −Σ_v π_v log π_v, of the tempered distribution, subtracted with `entropy_coef`
    sft         −log π

[1] Schulman et al. 2017, arXiv:1707.06347. [2] Yu et al. 2025, arXiv:2503.14476. [3] Zheng et al. 2025, arXiv:2507.18071. [4] MiniMax 2025,
arXiv:2506.13585. [5] Ye et al. 2020, Mastering complex control in MOBA games. [6] Yao et al. 2025, Your efficient RL framework secretly brings you
off-policy training. [7] Liu et al. 2025, When speed kills stability. [8] Ling team 2025, IcePop. [9] Hilton et al. 2022, arXiv:2110.00641.
[10] Schulman 2020, Approximating KL divergence. [11] Shao et al. 2024, arXiv:2402.03300. [12] DeepSeek-AI 2025 (V3.2), arXiv:2512.02556.
[13] Huang et al. 2022, The 37 implementation details of PPO.
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
    proximal_weight: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    importance_log_ratio: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
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


def cispo(log_probs: Tensor, ratio: Tensor, advantages: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """The loss of CISPO per token, and where its weight is clipped; such tokens keep a gradient."""
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    weight = ratio.detach().clamp(1 - loss.eps_clip, 1 + high)
    return -advantages * weight * log_probs, weight != ratio.detach()


def importance_weight(log_ratio: Tensor, loss: LossConfig) -> Tensor:
    """exp(log_ratio) within the bounds of `loss`: truncated to them, or 0 outside."""
    weight = log_ratio.exp()
    if loss.tis_mode == "mask":
        inside = (weight >= loss.tis_clip_low) & (weight <= loss.tis_threshold)
        return torch.where(inside, weight, 0.0)
    return weight.clamp(min=loss.tis_clip_low or None, max=loss.tis_threshold)


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
        x = x.clamp(-20, 20)
        return (x.exp() - x - 1).clamp(-10, 10)
    raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl; found {kind!r}")


def value_loss(values: Tensor, data: TokenData, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """The critic's loss per token, and where clipping is active."""
    assert data.returns is not None, "the batch is checked before: a critic's rows have returns"
    error = (values - data.returns).square()
    if loss.value_clip is None or data.values is None:
        return error / 2, torch.zeros_like(error)
    bounded = data.values + (values - data.values).clamp(-loss.value_clip, loss.value_clip)
    clipped_error = (bounded - data.returns).square()
    return torch.maximum(error, clipped_error) / 2, clipped_error > error


def token_loss(log_probs: Tensor, entropy: Tensor, data: TokenData, loss: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of one micro-batch.

    Args:
        log_probs: [n], of the trained tokens under the current weights, with gradient; a critic's values.
        entropy: [n], of the current distributions at the trained tokens.
        data: the other inputs.
        loss: kind and coefficients.

    Returns:
        The summed loss (scalar, with gradient), and `SUMS` and `MAXIMA` of step_metrics.py (fp64, detached).
    """
    w, current = data.weights, log_probs.detach()
    old = _old_log_probs(current, data)
    ratio, kl, tis = torch.exp(log_probs - old), torch.zeros_like(current), torch.ones_like(current)
    if loss.use_tis:
        log_ratio = old - data.rollout_log_probs if data.importance_log_ratio is None else data.importance_log_ratio
        tis = importance_weight(log_ratio, loss)
    if loss.kind == "sft":
        pg, clipped = -log_probs, torch.zeros_like(current)
        total = (w * pg).sum()
    elif loss.kind == "value":
        pg, clipped = value_loss(log_probs, data, loss)
        total = (w * pg).sum()
    else:
        pg, clipped, ratio = _policy_loss(log_probs, ratio, data, loss)
        total = (w * pg * tis).sum()
        if data.ref_log_probs is not None:
            kl = kl_estimate(log_probs, data.ref_log_probs, loss.kl_loss_type)
            if loss.use_unbiased_kl:
                kl = torch.exp(log_probs - old) * kl
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


def _old_log_probs(current: Tensor, data: TokenData) -> Tensor:
    """log π_old: the given ones, interpolated ones, or the current ones (ratio 1)."""
    if data.proximal_weight is not None:
        return data.rollout_log_probs + data.proximal_weight * (current - data.rollout_log_probs)
    return current if data.old_log_probs is None else data.old_log_probs


def _policy_loss(log_probs: Tensor, ratio: Tensor, data: TokenData, loss: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The policy loss per token, where clipping is active, and the ratio that it uses."""
    if loss.policy_loss == "cispo":
        return *cispo(log_probs, ratio, data.advantages, loss), ratio
    if loss.policy_loss == "sequence":
        ratio = torch.exp(log_probs - log_probs.detach())
        if data.sequence_log_ratio is not None:
            ratio = ratio * data.sequence_log_ratio.exp()
    return *surrogate(ratio, data.advantages, loss), ratio
