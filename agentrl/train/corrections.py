"""Corrections for the difference between the engine's distribution and the trainer's, beyond what the loss computes token by token.

Levels: a token, the sampled tokens of a turn, or those of the episode, over all its segments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentrl.train.estimators import Doubles, Episodes


def _units(episodes: Episodes, level: str) -> tuple[NDArray[np.int64], int]:
    """[T] number of the token's unit, and the number of units."""
    if level == "token":
        return np.arange(len(episodes.episode)), len(episodes.episode)
    if level == "episode":
        return episodes.episode, len(episodes.scores)
    pairs = np.stack([episodes.episode, episodes.turn])
    distinct, units = np.unique(pairs, axis=1, return_inverse=True)
    return units.reshape(-1), distinct.shape[1]


def summed(episodes: Episodes, log_ratios: Doubles, level: str) -> Doubles:
    """[T] sum of log π_old − log π_rollout over the token's turn or episode: the log of the importance weight at that level."""
    units, count = _units(episodes, level)
    return np.asarray(np.bincount(units, log_ratios, count)[units], np.float64)


def averaged(episodes: Episodes, log_ratios: Doubles, level: str) -> Doubles:
    """[T] mean over the token's turn or episode: the log of the geometric mean of the ratios."""
    units, count = _units(episodes, level)
    means = np.bincount(units, log_ratios, count) / np.maximum(np.bincount(units, minlength=count), 1)
    return np.asarray(means[units], np.float64)


def rejected(episodes: Episodes, log_ratios: Doubles, level: str, low: float, high: float) -> NDArray[np.bool_]:
    """[T] whether the mean ratio of the token's unit is outside [low, high]. Liu et al. 2025 (When speed kills stability), sequence masks."""
    mean = averaged(episodes, log_ratios, level)
    return np.asarray((mean < (np.log(low) if low else -np.inf)) | (mean > np.log(high)), np.bool_)


def proximal_weight(versions: NDArray[np.int64], now: int) -> Doubles:
    """α of log π_old = log π_rollout + α (log π − log π_rollout), by the age d of the weights that sampled each token: d / (d + 1).

    The proximal policy is version `now`, the current one is on its way to `now` + 1: α = (now − v) / (now + 1 − v), the log-linear
    interpolation of AReaL. Tokens of unknown version (−1) count as new.
    """
    age = np.where(versions < 0, 0, np.maximum(now - versions, 0)).astype(np.float64)
    return age / (age + 1)


def kl_values(log_probs: Doubles, ref_log_probs: Doubles, kind: str) -> Doubles:
    """The KL estimators of train/megatron/loss.py in numpy, for the penalty in the reward."""
    x = ref_log_probs - log_probs
    if kind == "k1":
        return -x
    if kind == "k2":
        return np.asarray(x * x / 2, np.float64)
    if kind == "k3":
        return np.asarray(np.exp(x) - x - 1, np.float64)
    x = x.clip(-20, 20)
    return np.asarray((np.exp(x) - x - 1).clip(-10, 10), np.float64)
