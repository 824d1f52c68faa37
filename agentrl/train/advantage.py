"""From the episodes of a rollout to the advantages of their tokens. The estimators themselves are in `estimators/`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from agentrl.errors import DataError
from agentrl.train.base import Floats, Row
from agentrl.train.estimators import Doubles, Episodes, Options, find_estimator
from agentrl.train.estimators.base import EQUAL as EQUAL
from agentrl.train.sample import Sample, to_samples
from agentrl.types import Group, Status, StopReason, Trajectory, by_role

_MAX_SCORE = 1e36
"""The sum of many rewards of the largest size (see `real_number`); float32 ends at 3e38."""
FIRST_STATE = ""
"""key of the state before the first turn, which is the same in all episodes of a group"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """Soft overlong punishment: Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 13, times `factor`."""

    limit: int
    """maximum tokens of a response, L_max"""
    buffer: int
    """the last tokens below the limit, in which the penalty grows linearly, L_cache; 0: no penalty"""
    factor: float = 1.0

    def penalty(self, length: int) -> float:
        """0 up to limit − buffer tokens, −factor from the limit on, linear between."""
        if not self.buffer:
            return 0.0
        over = length - (self.limit - self.buffer)
        return -self.factor * min(max(over / self.buffer, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The episodes of a rollout that count in a baseline, with what estimators need of them."""

    trajectories: tuple[Trajectory, ...]
    samples: tuple[tuple[Sample, ...], ...]
    """of each episode, those with a trained token"""
    data: Episodes

    @property
    def trained_samples(self) -> list[Sample]:
        """The samples of the episodes that are trained on."""
        return [s for samples, used in zip(self.samples, self.data.trained, strict=True) if used for s in samples]

    def by_episode(self, tokens: Doubles) -> dict[str, Doubles]:
        """Values [T] as one array for each episode that is trained on, by its id."""
        parts = zip(self.trajectories, self.data.starts(), self.data.trained, strict=True)
        return {t.episode_id: tokens[part] for t, part, used in parts if used}

    def of_rows(self, rows: Sequence[Row], values: Sequence[Floats]) -> Doubles:
        """[T] per-token values of rows; 0 for the tokens of episodes that are not trained on."""
        by_source = {r.source: v[np.flatnonzero(r.weights)] for r, v in zip(rows, values, strict=True)}
        empty = np.zeros(0)
        tokens = [
            by_source.get((s.episode_id, s.segment_index), np.zeros(s.trained_tokens) if not used else empty)
            for samples, used in zip(self.samples, self.data.trained, strict=True)
            for s in samples
        ]
        return np.concatenate([empty, *tokens]).astype(np.float64)

    def with_penalties(self, penalties: Doubles) -> Compared:
        """The same with per-token penalties [T] taken from the rewards, and their sums from the scores."""
        sums = np.bincount(self.data.episode, penalties, len(self.data.scores))
        return replace(
            self, data=replace(self.data, rewards=self.data.rewards - penalties, scores=self.data.scores - sums)
        )


def compare(
    groups: Sequence[Group | Sequence[Trajectory]], truncated: str = "train", overlong: Overlong | None = None
) -> Compared:
    """Collect the episodes of groups that count in a baseline. In episodes of several roles each role is one, compared with the same role.

    Args:
        groups: each a `Group`, or a list of the trajectories of one task.
        truncated: the treatment of truncated episodes; 'train': as complete ones; 'mask': in the baseline, but not trained on; 'drop': neither.
        overlong: the penalty for long responses; None: none.

    Raises:
        DataError: a score that is not finite, or too large for float32.
    """
    lists = [part for g in groups for part in by_role(g.trajectories if isinstance(g, Group) else g)]
    members = [(number, t) for number, part in enumerate(lists) for t in part if in_baseline(t, truncated)]
    trajectories = tuple(t for _, t in members)
    raw = [_score(t) for t in trajectories]
    samples = tuple(tuple(s for s in to_samples(t) if s.trained_tokens) for t in trajectories)
    turns = [trained_turns(part) for part in samples]
    penalties = [overlong.penalty(_response_tokens(t)) if overlong else 0.0 for t in trajectories]
    place = {t.episode_id: i for i, t in enumerate(trajectories)}
    scores = [score + penalty for score, penalty in zip(raw, penalties, strict=True)]
    return Compared(
        trajectories=trajectories,
        samples=samples,
        data=Episodes(
            scores=np.array(scores, np.float64),
            groups=np.array([number for number, _ in members], np.int64),
            trained=np.array([is_trained(t, truncated) for t in trajectories], np.bool_),
            episode=np.repeat(np.arange(len(turns)), [len(t) for t in turns]).astype(np.int64),
            turn=np.concatenate([np.zeros(0, np.int64), *turns]),
            rewards=np.concatenate(
                [np.zeros(0), *(_token_rewards(*part) for part in zip(trajectories, turns, scores, strict=True))]
            ),
            state_keys=tuple(map(_state_keys, trajectories)),
            steps=tuple(map(_steps, trajectories)),
            parents=np.array([place.get(t.parent or "", -1) for t in trajectories], np.int64),
            branch_turns=np.array([t.branch_turn for t in trajectories], np.int64),
        ),
    )


def trained_turns(samples: Sequence[Sample]) -> np.ndarray:
    """The turn of each trained token of an episode, in order of segments and positions."""
    turns = [np.zeros(0, np.int64)]
    for sample in samples:
        values, counts = zip(*sample.turn_of, strict=True) if sample.turn_of else ((0,), (sample.response_length,))
        turns.append(np.repeat(np.array(values, np.int64), counts)[np.flatnonzero(sample.loss_mask or ())])
    return np.concatenate(turns)


def _state_keys(trajectory: Trajectory) -> tuple[str | None, ...]:
    """The key of the state before each turn; a summary leaves the state as it is."""
    keys: list[str | None] = [FIRST_STATE]
    for turn in trajectory.turns[:-1]:
        keys.append(turn.state_key if turn.summary is None else keys[-1])
    return tuple(keys)


def _steps(trajectory: Trajectory) -> tuple[int, ...]:
    """The environment's step of each turn; a summary belongs to that of the turn after it."""
    return tuple(accumulate((turn.summary is None for turn in trajectory.turns[:-1]), initial=0))


def _token_rewards(trajectory: Trajectory, turns: np.ndarray, score: float) -> Doubles:
    """A turn's reward lies on the last trained token up to that turn, what is left of the score on the last token.

    The rewards of turns before a branch belong to the episode that it branched from.
    """
    rewards = np.zeros(len(turns))
    if not len(turns):
        return rewards
    own = trajectory.turns[trajectory.branch_turn :]
    for turn in own:
        rewards[max(int(np.searchsorted(turns, turn.index, "right")) - 1, 0)] += turn.reward
    before = math.fsum(t.reward for t in trajectory.turns[: trajectory.branch_turn])
    rewards[-1] += score - before - math.fsum(t.reward for t in own)
    return rewards


def _response_tokens(trajectory: Trajectory) -> int:
    """Tokens after the first prompt, in the longest segment, as the response limit counts them."""
    samples = [s for s in trajectory.segments if len(s)]
    if not samples:
        return 0
    first = next((i for i, s in enumerate(samples[0].spans) if s.turn >= 0), len(samples[0].spans))
    prompt = sum(len(s.ids) for s in samples[0].spans[:first])
    return max(len(s) - prompt for s in samples)


def group_advantages(
    groups: Sequence[Group | Sequence[Trajectory]],
    estimator: str = "grpo",
    truncated: str = "train",
    options: Options | None = None,
) -> dict[str, float]:
    """The mean advantage of each episode that is trained on, by its id; of several roles, of each by its `role_id`.

    Args:
        groups: each a `Group`, or a list of the trajectories of one task.
        estimator: a registered name, module:function or file.py:function.
        truncated: the treatment of truncated episodes; see `compare`.
        options: what the estimator reads; None: the defaults.

    Raises:
        UnknownNameError: unknown estimator.
        ConfigError: the estimator needs the values of a critic.
        DataError: a score that is not finite, or too large for float32.
    """
    compute = find_estimator(estimator)
    compared = compare(groups, truncated)
    by_episode = compared.by_episode(compute(compared.data, options))
    return {episode: _mean(values) for episode, values in by_episode.items()}


def _mean(values: Doubles) -> float:
    """The mean; exact where all values are equal."""
    if not len(values):
        return 0.0
    return float(values[0]) if (values == values[0]).all() else float(values.mean())


def _score(trajectory: Trajectory) -> float:
    try:
        score = trajectory.score
    except OverflowError:
        score = math.inf
    if not abs(score) <= _MAX_SCORE:
        raise DataError(
            f"episode {trajectory.episode_id} scored {score:g}; a score must be finite and at most {_MAX_SCORE:g}: check its rewards and weights"
        )
    return score


def in_baseline(trajectory: Trajectory, truncated: str) -> bool:
    """Whether the episode's score is part of its group's baseline."""
    if trajectory.stop_reason is StopReason.EPISODE_TIMEOUT:
        return False
    status = trajectory.status
    return status is Status.COMPLETED or (status is Status.TRUNCATED and truncated != "drop")


def is_trained(trajectory: Trajectory, truncated: str) -> bool:
    """Whether the episode's sampled tokens are trained on."""
    return in_baseline(trajectory, truncated) and (trajectory.status is Status.COMPLETED or truncated == "train")
