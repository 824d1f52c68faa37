"""From samples and advantages to the rows of an optimizer step. All normalisation happens here, once, by one global denominator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.core.message_images import PlacedImage
from agentrl.errors import DataError, InvariantError, StoreError
from agentrl.train.base import Row
from agentrl.train.sample import Sample
from agentrl.types import Provenance

NORMALISATIONS = ("sequence", "token", "constant")
"""sequence: the mean over each episode's trained tokens, then the mean over episodes; token: the mean over all trained tokens; constant: the sum
over each episode's trained tokens divided by a constant, then the mean over episodes."""


def make_rows(
    samples: Sequence[Sample],
    advantages: Mapping[str, float],
    normalisation: str = "sequence",
    *,
    constant: int = 1,
    replay_experts: bool = False,
) -> list[Row]:
    """Rows of one optimizer step. `advantages` by episode id; a sample whose episode has none is not trained on.

    A sequence is an episode: the trained tokens of all its segments. A fully masked sample has no row and is in no denominator.
    `constant` is the divisor of the normalisation 'constant'. `replay_experts`: the rows have the experts that the engine recorded.

    Raises:
        InvariantError: a sample contradicts itself, or a segment occurs twice.
        DataError: no experts were recorded for a sample.
        StoreError: an image of a sample cannot be read, or was changed.
    """
    if normalisation not in NORMALISATIONS:
        raise InvariantError(f"normalisation must be one of {NORMALISATIONS}, found {normalisation!r}")
    used = [s for s in samples if s.episode_id in advantages and s.trained_tokens]
    for sample in used:
        sample.check()
    if len({(s.episode_id, s.segment_index) for s in used}) != len(used):
        raise InvariantError("a segment of an episode occurs twice; each is trained on once")
    tokens: dict[str, int] = {}
    for sample in used:
        tokens[sample.episode_id] = tokens.get(sample.episode_id, 0) + sample.trained_tokens
    total = sum(tokens.values())
    fixed = {"token": total, "constant": len(tokens) * constant}.get(normalisation)
    weights = {e: 1.0 / (fixed or len(tokens) * n) for e, n in tokens.items()}
    return [
        make_row(s, advantage=advantages[s.episode_id], weight=weights[s.episode_id], replay_experts=replay_experts)
        for s in used
    ]


def with_tokens(rows: Sequence[Row], name: str, values: Mapping[str, NDArray[np.float64]]) -> list[Row]:
    """The rows with a field set to values of their trained tokens, given by episode id in order of segments and positions."""
    ends: dict[str, int] = {}
    filled: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda r: r.source):
        episode, chosen = row.source[0], np.flatnonzero(row.weights)
        start = ends.get(episode, 0)
        ends[episode] = start + len(chosen)
        array = np.zeros(len(row.tokens), np.float32)
        array[chosen] = values[episode][start : ends[episode]]
        filled[row.source] = replace(row, **cast(Any, {name: array}))
    return [filled[row.source] for row in rows]


def without_experts(rows: Sequence[Row]) -> list[Row]:
    """The rows without recorded experts, for a model whose routers choose by themselves."""
    return [row if row.routed_experts is None else replace(row, routed_experts=None) for row in rows]


def make_row(
    sample: Sample, *, advantage: float | NDArray[np.floating], weight: float, replay_experts: bool = False
) -> Row:
    """The row of a sample. `advantage` is that of all its trained tokens, or one for each; `weight` is that of each of them.

    Raises:
        DataError: `replay_experts`, and no experts were recorded.
        StoreError: an image cannot be read, or was changed.
    """
    recorded = sample.rollout_routed_experts if replay_experts else None
    if replay_experts and recorded is None:
        raise DataError(
            f"episode {sample.episode_id}, segment {sample.segment_index} has no routed experts to replay: record episodes with "
            "--use-rollout-routing-replay, or train without it"
        )
    length, start = len(sample.tokens), len(sample.tokens) - sample.response_length
    mask = np.zeros(length, np.float32)
    mask[start:] = sample.loss_mask
    advantages = np.zeros(length, np.float32)
    advantages[mask > 0] = advantage
    log_probs = np.zeros(length, np.float32)
    if sample.rollout_log_probs is not None:
        log_probs[start:] = sample.rollout_log_probs
    return Row(
        tokens=np.asarray(sample.tokens, np.int32),
        weights=mask * np.float32(weight),
        advantages=advantages,
        rollout_log_probs=log_probs,
        temperature=np.where(mask > 0, np.float32(sample.temperature or 1.0), np.float32(1.0)).astype(np.float32),
        sampled=_sampled(sample),
        routed_experts=None if recorded is None else recorded.array(),
        images=_images(sample),
        source=(sample.episode_id, sample.segment_index),
        turns=tuple(sample.turn_of),
    )


def _images(sample: Sample) -> tuple[PlacedImage, ...]:
    images = (sample.multimodal_inputs or {}).get("images", ())
    try:
        return tuple(
            PlacedImage(image.loaded(), at, tokens)
            for image, (at, tokens) in zip(images, sample.image_places, strict=True)
        )
    except StoreError as e:
        raise StoreError(f"episode {sample.episode_id}, segment {sample.segment_index}: {e}") from e


def _sampled(sample: Sample) -> NDArray[np.bool_]:
    """Which tokens have a log-prob of the engine. A sample without provenance was sampled where it is trained."""
    sampled = np.zeros(len(sample.tokens), np.bool_)
    if sample.rollout_log_probs is not None and sample.response_length:
        runs = sample.provenance
        kinds = np.repeat([kind for kind, _ in runs], [count for _, count in runs])
        sampled[-sample.response_length :] = kinds == Provenance.SAMPLED if runs else np.asarray(sample.loss_mask) == 1
    return sampled


def split_steps(samples: Sequence[Sample], steps: int) -> list[list[Sample]]:
    """Samples of each optimizer step: whole episodes in the order of their index, divided evenly. Branches have the index of their episode."""
    episodes: dict[str | int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: -1 if s.index is None else s.index):
        episodes.setdefault(sample.episode_id if sample.index is None else sample.index, []).append(sample)
    parts = np.array_split(np.arange(len(episodes)), max(1, min(steps, len(episodes))))
    members = list(episodes.values())
    return [list(chain.from_iterable(members[i] for i in part)) for part in parts]


def rows_with_gradient(rows: Sequence[Row], *, keep_flat: bool) -> list[Row]:
    """The rows of episodes with an advantage. `keep_flat`: all of them, because the loss has other terms (KL, entropy)."""
    learned = {r.source[0] for r in rows if r.advantages.any()}
    return list(rows) if keep_flat else [r for r in rows if r.source[0] in learned]
