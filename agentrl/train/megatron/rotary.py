"""Frequencies of rotary position embeddings, with the scalings of Llama 3.1 and of YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from agentrl.train.megatron.families.base import Rope


def frequencies(rope: Rope, channels: int) -> Tensor:
    """Radians for each position, [channels / 2] fp32 (Su et al. 2021, section 3.2.2)."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))
    if rope.llama3:
        return _llama3(plain, rope.llama3)
    return _yarn(plain, rope.theta, rope.yarn) if rope.yarn else plain


def axes(rope: Rope) -> Tensor | None:
    """For each pair of channels which of a position's three numbers rotates it, [channels / 2] int64 (M-RoPE); None: there is one number."""
    return None if rope.sections is None else torch.arange(3).repeat_interleave(torch.tensor(rope.sections))


def attention_factor(rope: Rope) -> float:
    """The factor of cosine and sine."""
    if not rope.yarn:
        return 1.0
    factor, one, all_channels = (rope.yarn[name] for name in ("factor", "mscale", "mscale_all_dim"))
    if one and all_channels:
        return _magnitude(factor, one) / _magnitude(factor, all_channels)
    return _magnitude(factor, 1.0)


def latent_scale(rope: Rope, head_dim: int) -> float:
    """The factor of the scores of latent attention: with YaRN the queries and keys of all channels are scaled too."""
    magnitude = _magnitude(rope.yarn["factor"], rope.yarn["mscale_all_dim"]) if rope.yarn else 1.0
    return magnitude**2 / math.sqrt(head_dim)


def _magnitude(factor: float, coefficient: float) -> float:
    """Peng et al. 2023 (YaRN), equation 22, with a coefficient as in DeepSeek-V2; 1 if it is 0."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def _llama3(plain: Tensor, rope: Mapping[str, float]) -> Tensor:
    """Llama 3.1's scaling (as in transformers): long wavelengths are divided by `factor`, short ones kept, with a linear blend between."""
    rotations = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / rope["factor"] + blend * plain


def _yarn(plain: Tensor, theta: float, rope: Mapping[str, float]) -> Tensor:
    """Peng et al. 2023 (YaRN), section 3.2: frequencies are divided by `factor` where a pair rotates less than `beta_slow` times in the
    original context, kept where it rotates more than `beta_fast` times, with a linear blend over whole pairs between.
    """
    pairs, context = len(plain), rope["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(theta)

    first, last = max(math.floor(pair(rope["beta_fast"])), 0), min(math.ceil(pair(rope["beta_slow"])), 2 * pairs - 1)
    width = last - first or 0.001
    divided = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / rope["factor"] * divided + plain * (1 - divided)
