"""From the episodes of a rollout to its optimizer steps: rows, log-probs, values, advantages, and the losses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.config import Config
from agentrl.config.settings import TrainSettings
from agentrl.train import corrections
from agentrl.train.advantage import Compared, Overlong, compare
from agentrl.train.base import Critic, Floats, LossConfig, Row, Trainer
from agentrl.train.branch_weights import with_branch_weights
from agentrl.train.distillation import Teachers
from agentrl.train.estimators import Doubles, Estimator, Options, find_estimator, whiten
from agentrl.train.estimators.turns import anchor_groups
from agentrl.train.rows import make_rows, rows_with_gradient, split_steps, with_tokens
from agentrl.train.sample import to_samples
from agentrl.types import Group, by_role

Steps = list[list[Row]]


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that score a rollout's tokens."""

    trainer: Trainer
    critic: Critic | None = None
    teachers: Teachers | None = None


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The optimizer steps of a rollout."""

    policy: Steps
    critic: Steps = field(default_factory=list)
    """the critic's; empty without a critic"""
    metrics: dict[str, float] = field(default_factory=dict)


async def prepare(groups: Sequence[Group], config: Config, models: Models, *, policy_version: int = 0) -> Batches:
    """Compute the rows of each of `num_steps_per_rollout` optimizer steps, without the steps that have none.

    Args:
        groups: the episodes of the rollout.
        config: all settings.
        models: what scores their tokens, where the estimator or the loss needs it.
        policy_version: version of the trainer's weights.

    Raises:
        DataError: a score is not finite, or too large.
        ConfigError: the estimator needs what the run lacks.
    """
    return await _Preparation(groups, config, models, policy_version).run()


def loss_config(settings: TrainSettings) -> LossConfig:
    """The policy loss of the settings."""
    return LossConfig(
        policy_loss=find_estimator(settings.advantage_estimator).policy_loss,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
        kl_loss_coef=settings.kl_loss_coef if settings.use_kl_loss else 0.0,
        kl_loss_type=settings.kl_loss_type,
        use_unbiased_kl=settings.use_unbiased_kl,
        entropy_coef=settings.entropy_coef,
        use_tis=settings.use_tis,
        tis_mode=settings.tis_mode,
        tis_threshold=settings.tis_threshold,
        tis_clip_low=settings.tis_clip_low,
    )


def critic_loss(settings: TrainSettings) -> LossConfig:
    """The critic's loss of the settings."""
    return LossConfig(kind="value", value_clip=settings.value_clip)


def needs_reference(settings: TrainSettings) -> bool:
    """Whether a frozen copy of the first weights is kept."""
    return settings.use_kl_loss or settings.kl_coef > 0


def options(settings: TrainSettings) -> Options:
    """The settings that estimators read."""
    return Options(gamma=settings.gamma, lambd=settings.lambd, step_weight=settings.gigpo_step_weight)


def overlong(config: Config) -> Overlong | None:
    """The penalty of `overlong_buffer_len`; None if it is off."""
    buffer, limit = config.train.overlong_buffer_len, config.rollout.rollout_max_response_len
    return Overlong(limit=limit, buffer=buffer, factor=config.train.overlong_penalty_factor) if buffer else None


def normalisation(settings: TrainSettings, estimator: Estimator) -> str:
    """How tokens are weighted: as the estimator's paper does, or by `calculate_per_token_loss`."""
    by_setting = "token" if settings.calculate_per_token_loss else "sequence"
    if estimator.normalisation == "constant" and settings.calculate_per_token_loss:
        return "token"  # weighs all tokens equally, as a constant does
    return by_setting if estimator.normalisation == "setting" else estimator.normalisation


async def with_sequence_ratios(trainer: Trainer, rows: Sequence[Row]) -> list[Row]:
    """The rows with the mean of log π − log π_old over the trained tokens of each episode, under the trainer's weights.

    An episode's rows may lie in different micro-batches and on different ranks, so the mean is taken before the step, from a forward pass.
    """
    current = await asyncio.to_thread(partial(trainer.log_probs, trained_only=True), rows)
    sums: dict[str, list[float]] = {}
    for row, now in zip(rows, current, strict=True):
        assert row.old_log_probs is not None, "called only after the first step, for which old log-probs exist"
        chosen = row.weights != 0
        total = sums.setdefault(row.source[0], [0.0, 0.0])
        total[0] += float((now - row.old_log_probs)[chosen].sum(dtype=np.float64))
        total[1] += int(chosen.sum())
    means = {episode: total / count for episode, (total, count) in sums.items()}
    return [
        replace(row, sequence_log_ratio=np.where(row.weights != 0, means[row.source[0]], 0.0).astype(np.float32))
        for row in rows
    ]


def engine_difference(rows: Sequence[Row], log_probs: Sequence[Floats]) -> float:
    """The largest difference between the trainer's log-probs of trained tokens and the engine's."""
    return max(
        (
            float(np.abs(now - row.rollout_log_probs)[row.weights != 0].max(initial=0.0))
            for row, now in zip(rows, log_probs, strict=True)
        ),
        default=0.0,
    )


class _Preparation:
    """The state of one call of `prepare`."""

    def __init__(self, groups: Sequence[Group], config: Config, models: Models, version: int) -> None:
        self.settings = config.train
        self.models, self.version = models, version
        self.estimator = find_estimator(self.settings.advantage_estimator)
        self.compared = compare(groups, config.env.truncated_episodes, overlong(config))
        self.steps = _rows_of_steps(groups, self.compared, config, self.estimator)
        self.metrics: dict[str, float] = {}

    async def run(self) -> Batches:
        s = self.settings
        by_ratios = s.rejection_level != "none" or (s.use_tis and s.tis_level != "token")
        early = self.models.critic is not None or bool(s.kl_coef) or by_ratios
        if early:  # the advantages depend on what the models say of the tokens
            self.steps = [rows for rows in self.steps if rows]
            await self.add_inputs(old=True)
        self.subtract_kl()
        advantages = self.estimate()
        if self.models.teachers is not None:
            advantages = advantages - await self.distillation(self.models.teachers)
        if by_ratios:
            advantages = self.correct(advantages)
        self.set_tokens("advantages", advantages)
        critic = self.steps if self.models.critic is not None else []
        keep_flat = bool(s.kl_loss_coef or s.entropy_coef)
        self.steps = [
            kept for rows in self.steps if (kept := rows_with_gradient(_without_values(rows), keep_flat=keep_flat))
        ]
        if not early:
            await self.add_inputs(old=len(self.steps) > 1)
        return Batches(policy=self.steps, critic=critic, metrics=self.metrics)

    async def add_inputs(self, *, old: bool) -> None:
        """Add old log-probs if `old`, those of the reference model, and the critic's values.

        With a single optimizer step the ratio is 1 by definition, and old log-probs are left out where nothing else needs them.
        """
        s, trainer = self.settings, self.models.trainer
        if s.proximal_log_probs == "rollout" or s.true_on_policy_mode:
            self.steps = [[replace(row, old_log_probs=row.rollout_log_probs) for row in rows] for rows in self.steps]
        elif s.proximal_log_probs == "interpolate" and not s.kl_coef:
            self.set_tokens("proximal_weight", corrections.proximal_weight(self.token_versions(), self.version))
        elif old:
            await self.score("old_log_probs", partial(trainer.log_probs, trained_only=True))
        if needs_reference(s):
            await self.score("ref_log_probs", partial(trainer.log_probs, reference=True, trained_only=True))
        if self.models.critic is not None:
            await self.score("values", self.models.critic.values)

    async def score(self, name: str, compute: Callable[[Sequence[Row]], Sequence[NDArray[np.float32]]]) -> None:
        """Set a field of all rows to what a model computes."""
        found = [await asyncio.to_thread(compute, rows) for rows in self.steps]
        self.steps = [
            [replace(row, **cast(Any, {name: values})) for row, values in zip(rows, part, strict=True)]
            for rows, part in zip(self.steps, found, strict=True)
        ]

    def subtract_kl(self) -> None:
        """Take the KL divergence to the reference from the rewards."""
        if not self.settings.kl_coef:
            return
        kl = corrections.kl_values(
            self.tokens("old_log_probs"), self.tokens("ref_log_probs"), self.settings.kl_loss_type
        )
        kl = np.where(self.used, kl, 0.0)
        self.compared = self.compared.with_penalties(self.settings.kl_coef * kl)
        self.metrics["reward_kl"] = self.mean(kl)

    def estimate(self) -> Doubles:
        """The advantages [T]; sets the critic's targets."""
        data = self.compared.data
        if self.models.critic is not None:
            data = replace(data, values=self.tokens("values"))
        advantages = self.estimator(data, options(self.settings))
        if data.values is not None:
            returns = advantages + data.values
            self.set_tokens("returns", returns)
            self.metrics |= {"value_mean": self.mean(data.values), "return_mean": self.mean(returns)}
        if "state_keys" in self.estimator.needs:
            turns = [len(places) for places in anchor_groups(data)]
            self.metrics["turns_with_equal_state"] = sum(n for n in turns if n > 1) / max(sum(turns), 1)
        return whiten(advantages, self.used) if self.settings.normalize_advantages else advantages

    async def distillation(self, teachers: Teachers) -> Doubles:
        """[T] the reverse KL to the teachers, times its coefficient."""
        rows = [row for part in self.steps for row in part]
        tasks = {t.episode_id: t.task for t in self.compared.trajectories}
        scores = self.compared.of_rows(rows, await teachers.log_probs(rows, tasks))
        reverse_kl = np.where(self.used, self.tokens("rollout_log_probs") - scores, 0.0)
        self.metrics["opd_reverse_kl"] = self.mean(reverse_kl)
        return self.settings.opd_kl_coef * reverse_kl

    def correct(self, advantages: Doubles) -> Doubles:
        """Set the importance ratios of turns or episodes; reject tokens."""
        s, data = self.settings, self.compared.data
        log_ratios = np.where(self.used, self.tokens("old_log_probs") - self.tokens("rollout_log_probs"), 0.0)
        if s.use_tis and s.tis_level != "token":
            self.set_tokens("importance_log_ratio", corrections.summed(data, log_ratios, s.tis_level))
        if s.rejection_level == "none":
            return advantages
        out = corrections.rejected(data, log_ratios, s.rejection_level, s.rejection_low, s.rejection_high)
        self.metrics["rejected_share"] = self.mean(out.astype(np.float64))
        return np.where(out, 0.0, advantages)

    # -- tokens of the compared episodes [T], and rows ----------------------------------------------------------------------

    @property
    def used(self) -> NDArray[np.bool_]:
        return self.compared.data.trained_tokens

    def mean(self, values: Doubles) -> float:
        """Over the tokens that are trained on."""
        return float(values[self.used].mean()) if self.used.any() else 0.0

    def tokens(self, name: str) -> Doubles:
        """[T] a field of the rows; 0 for episodes that are not trained on."""
        rows = [row for part in self.steps for row in part]
        return self.compared.of_rows(rows, [getattr(row, name) for row in rows])

    def set_tokens(self, name: str, values: Doubles) -> None:
        """Set a field of all rows to values [T]."""
        of_episodes = self.compared.by_episode(values)
        self.steps = [with_tokens(rows, name, of_episodes) for rows in self.steps]

    def token_versions(self) -> NDArray[np.int64]:
        """[T] version of the weights that sampled each token; −1: unknown."""
        versions = [np.zeros(0, np.int64)]
        for sample in (s for part in self.compared.samples for s in part):
            kinds, counts = (
                zip(*sample.policy_versions, strict=True)
                if sample.policy_versions
                else ((-1,), (sample.response_length,))
            )
            versions.append(np.repeat(np.array(kinds, np.int64), counts)[np.flatnonzero(sample.loss_mask or ())])
        return np.concatenate(versions)


def _without_values(rows: Sequence[Row]) -> list[Row]:
    """The rows without the critic's inputs, which the policy's loss does not read."""
    return [row if row.values is None else replace(row, values=None, returns=None) for row in rows]


def _rows_of_steps(groups: Sequence[Group], compared: Compared, config: Config, estimator: Estimator) -> Steps:
    """Rows without advantages. Episodes that are not trained on keep their places, so that the others do not move to another step."""
    known = {t.episode_id for t in compared.trajectories}
    sides = [t for g in groups for part in by_role(g.trajectories) for t in part]
    others = [s for t in sides if t.episode_id not in known for s in to_samples(t)]
    parts = split_steps(
        [*(s for part in compared.samples for s in part), *others], config.rollout.num_steps_per_rollout
    )
    advantages: dict[str, float] = {s.episode_id: 0.0 for s in compared.trained_samples}
    how: dict[str, Any] = {
        "normalisation": normalisation(config.train, estimator),
        "constant": config.rollout.rollout_max_response_len,
    }
    replay = config.rollout.use_rollout_routing_replay
    steps = [make_rows(part, advantages, replay_experts=replay, **how) for part in parts]
    if (compared.data.parents < 0).all():
        return steps
    return [with_branch_weights(rows, compared, **how) for rows in steps]
