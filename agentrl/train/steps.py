"""From the episodes of a rollout to its optimizer steps: advantages, rows, old and reference log-probs, and the loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agentrl.config import Config
from agentrl.config.settings import TrainSettings
from agentrl.train.advantage import group_advantages, normalized
from agentrl.train.base import Floats, LossConfig, Row, Trainer
from agentrl.train.rows import make_rows, rows_with_gradient, split_steps
from agentrl.train.sample import to_samples
from agentrl.types import Group


def step_rows(groups: Sequence[Group], config: Config) -> list[list[Row]]:
    """The rows of each of `num_steps_per_rollout` optimizer steps, without the steps that have none."""
    settings = config.train
    advantages = group_advantages(groups, settings.advantage_estimator, config.env.truncated_episodes)
    samples = [s for group in groups for trajectory in group.trajectories for s in to_samples(trajectory)]
    if settings.normalize_advantages:
        advantages = normalized(advantages, [(s.episode_id, s.trained_tokens) for s in samples])
    normalisation = "token" if settings.calculate_per_token_loss else "sequence"
    keep_flat = bool(settings.kl_loss_coef or settings.entropy_coef)
    parts = split_steps(samples, config.rollout.num_steps_per_rollout)
    steps = [rows_with_gradient(make_rows(part, advantages, normalisation), keep_flat=keep_flat) for part in parts]
    return [rows for rows in steps if rows]


async def with_log_probs(trainer: Trainer, steps: list[list[Row]], *, reference: bool) -> list[list[Row]]:
    """The rows with old log-probs, and with those of the reference model if `reference`.

    With a single optimizer step the ratio is 1 by definition, and old log-probs are left out.
    """

    async def scored(of_reference: bool) -> list[list[tuple[Row, Floats]]]:
        log_probs = partial(trainer.log_probs, reference=of_reference, trained_only=True)
        return [list(zip(rows, await asyncio.to_thread(log_probs, rows), strict=True)) for rows in steps]

    if len(steps) > 1:
        steps = [[replace(row, old_log_probs=values) for row, values in rows] for rows in await scored(False)]
    if reference:
        steps = [[replace(row, ref_log_probs=values) for row, values in rows] for rows in await scored(True)]
    return steps


def loss_config(settings: TrainSettings) -> LossConfig:
    """The policy loss of the settings."""
    return LossConfig(
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
        kl_loss_coef=settings.kl_loss_coef if settings.use_kl_loss else 0.0,
        kl_loss_type=settings.kl_loss_type,
        entropy_coef=settings.entropy_coef,
        use_tis=settings.use_tis,
        tis_threshold=settings.tis_threshold,
    )
