"""From a rollout's episodes to optimizer steps: advantages, rows, old and reference log-probs, the loss's settings, the learning rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agentrl.config import Config
from agentrl.config.settings import TrainSettings
from agentrl.train.advantage import group_advantages
from agentrl.train.base import Floats, LossConfig, Row, Trainer
from agentrl.train.rows import make_rows, split_steps, trained_rows
from agentrl.train.sample import to_samples
from agentrl.types import Group


def step_rows(groups: Sequence[Group], config: Config) -> list[list[Row]]:
    """What each of `num_steps_per_rollout` optimizer steps trains on; a step with nothing to train is left out."""
    t = config.train
    advantages = group_advantages(groups, t.advantage_estimator, config.env.truncated_episodes)
    samples = [s for g in groups for trajectory in g.trajectories for s in to_samples(trajectory)]
    mean = "token" if t.calculate_per_token_loss else "sequence"
    keep_flat = bool(t.kl_loss_coef or t.entropy_coef)
    parts = split_steps(samples, config.rollout.num_steps_per_rollout)
    steps = [trained_rows(make_rows(part, advantages, mean), keep_flat=keep_flat) for part in parts]
    return [rows for rows in steps if rows]


async def with_log_probs(trainer: Trainer, steps: list[list[Row]], *, reference: bool) -> list[list[Row]]:
    """Old log-probs (only where the weights change within the rollout: else the ratio is 1 by definition) and, if asked for, those of the
    reference model.
    """

    async def scored(of_reference: bool) -> list[list[tuple[Row, Floats]]]:
        ask = partial(trainer.log_probs, reference=of_reference, trained_only=True)
        return [list(zip(rows, await asyncio.to_thread(ask, rows), strict=True)) for rows in steps]

    if len(steps) > 1:
        steps = [[replace(row, old_log_probs=found) for row, found in rows] for rows in await scored(False)]
    if reference:
        steps = [[replace(row, ref_log_probs=found) for row, found in rows] for rows in await scored(True)]
    return steps


def loss_config(t: TrainSettings) -> LossConfig:
    """The loss as the settings want it."""
    return LossConfig(
        eps_clip=t.eps_clip,
        eps_clip_high=t.eps_clip_high,
        eps_clip_c=t.eps_clip_c,
        kl_loss_coef=t.kl_loss_coef if t.use_kl_loss else 0.0,
        kl_loss_type=t.kl_loss_type,
        entropy_coef=t.entropy_coef,
        use_tis=t.use_tis,
        tis_threshold=t.tis_threshold,
    )


def learning_rate(config: Config, step: int) -> float:
    """Warm-up, then constant, linear or cosine decay to a tenth over `num_rollout`."""
    t, total = config.train, config.rollout.num_rollout
    if step < t.lr_warmup_rollouts:
        return t.lr * (step + 1) / t.lr_warmup_rollouts
    done = (step - t.lr_warmup_rollouts) / max(1, total - t.lr_warmup_rollouts)
    factor = {"constant": 1.0, "linear": 1 - 0.9 * done, "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * done))}[
        t.lr_decay_style
    ]
    return t.lr * factor
