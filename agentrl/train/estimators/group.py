"""Estimators that compare the scores of a group. A group of one or of equal scores has advantage 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agentrl.train.estimators.base import Doubles, Episodes, Options, estimator


def standardised(scores: Sequence[float]) -> list[float]:
    """(r − mean) / (std + 1e-6), std with n − 1."""
    mean = math.fsum(scores) / len(scores)
    std = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
    return [(s - mean) / (std + 1e-6) for s in scores]


def centred(scores: Sequence[float]) -> list[float]:
    """r − mean."""
    mean = math.fsum(scores) / len(scores)
    return [s - mean for s in scores]


def less_the_others(scores: Sequence[float]) -> list[float]:
    """r − mean of the others."""
    total, others = math.fsum(scores), len(scores) - 1
    return [s - (total - s) / others for s in scores]


@estimator("grpo", needs=["group"])
def grpo(episodes: Episodes, options: Options) -> Doubles:
    """(r − mean) / std of the group, std with n − 1. Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), §4.1.2."""
    return episodes.on_tokens(episodes.by_group(standardised))


@estimator("dr_grpo", needs=["group"], normalisation="constant")
def dr_grpo(episodes: Episodes, options: Options) -> Doubles:
    """r − mean of the group; the sum over tokens is divided by a constant. Liu et al. 2025 (arXiv:2503.20783), §3.2."""
    return episodes.on_tokens(episodes.by_group(centred))


@estimator("rloo", needs=["group"], normalisation="constant")
def rloo(episodes: Episodes, options: Options) -> Doubles:
    """r − mean of the others; ∇ log π of the whole episode, a sum over its tokens. Ahmadian et al. 2024 (arXiv:2402.14740), §2."""
    return episodes.on_tokens(episodes.by_group(less_the_others))


@estimator("gspo", needs=["group"], policy_loss="sequence", normalisation="sequence")
def gspo(episodes: Episodes, options: Options) -> Doubles:
    """The advantage of grpo, with the ratio of the whole episode. Zheng et al. 2025 (arXiv:2507.18071), eq. 5 to 7."""
    return episodes.on_tokens(episodes.by_group(standardised))


@estimator("cispo", needs=["group"], policy_loss="cispo", normalisation="token")
def cispo(episodes: Episodes, options: Options) -> Doubles:
    """The advantage of grpo, with a clipped and detached ratio as a weight. MiniMax 2025 (M1, arXiv:2506.13585), eq. 4 and 5."""
    return episodes.on_tokens(episodes.by_group(standardised))


@estimator("distillation", needs=["teacher"])
def distillation(episodes: Episodes, options: Options) -> Doubles:
    """0: no rewards; the teacher's term is all there is to learn from (--opd-teacher)."""
    return np.zeros(len(episodes.episode))
