"""From samples and advantages to the rows a trainer is fed. All normalisation happens here, once, by a global denominator (design §7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from agentrl.errors import ConfigError, InvariantError
from agentrl.train.base import Row
from agentrl.train.sample import Sample

NO_IMAGES = "the trainer is a text model's (megatron-core's GPTModel) and cannot train on images"
NORMALISATIONS = ("sequence", "token")
"""sequence: each episode's mean over its trained tokens, then the mean over episodes; token: the mean over all trained tokens"""


def make_rows(samples: Sequence[Sample], advantages: Mapping[str, float], normalisation: str = "sequence") -> list[Row]:
    """Rows of one optimizer step. `advantages` by episode_id; a sample whose episode has none is not trained on.

    A sequence is the episode: all its segments' mask-1 tokens. A fully masked sample carries no weight and is in no denominator.

    Raises:
        InvariantError: a sample that contradicts itself, or the same segment twice.
        ConfigError: a sample with images, on which the trainer cannot train.
    """
    if normalisation not in NORMALISATIONS:
        raise InvariantError(f"normalisation must be one of {NORMALISATIONS}, found {normalisation!r}")
    used = [s for s in samples if s.episode_id in advantages and s.trained_tokens]
    for s in used:
        s.check()
        if s.multimodal_inputs is not None:
            raise ConfigError(f"episode {s.episode_id} holds images; {NO_IMAGES}")
    if len({(s.episode_id, s.segment_index) for s in used}) != len(used):
        raise InvariantError("a segment of an episode occurs twice; each is trained on once")
    tokens: dict[str, int] = {}
    for s in used:
        tokens[s.episode_id] = tokens.get(s.episode_id, 0) + s.trained_tokens
    total = sum(tokens.values())
    per_token = {e: 1.0 / total if normalisation == "token" else 1.0 / (len(tokens) * n) for e, n in tokens.items()}
    return [_row(s, advantages[s.episode_id], per_token[s.episode_id]) for s in used]


def _row(s: Sample, advantage: float, weight: float) -> Row:
    n, start = len(s.tokens), len(s.tokens) - s.response_length
    mask = np.zeros(n, np.float32)
    mask[start:] = s.loss_mask
    log_probs = np.zeros(n, np.float32)
    if s.rollout_log_probs is not None:
        log_probs[start:] = s.rollout_log_probs
    return Row(
        tokens=np.asarray(s.tokens, np.int32),
        weights=mask * np.float32(weight),
        advantages=mask * np.float32(advantage),
        rollout_log_probs=log_probs,
        temperature=np.where(mask > 0, np.float32(s.temperature or 1.0), np.float32(1.0)).astype(np.float32),
        source=(s.episode_id, s.segment_index),
    )


def split_steps(samples: Sequence[Sample], steps: int) -> list[list[Sample]]:
    """Samples into optimizer steps: whole episodes, in order of their ordinal, evenly."""
    episodes: dict[str, list[Sample]] = {}
    for s in sorted(samples, key=lambda s: -1 if s.index is None else s.index):
        episodes.setdefault(s.episode_id, []).append(s)
    parts = np.array_split(np.arange(len(episodes)), max(1, min(steps, len(episodes))))
    members = list(episodes.values())
    return [list(chain.from_iterable(members[i] for i in part)) for part in parts]


def trained_rows(rows: Sequence[Row], *, keep_flat: bool) -> list[Row]:
    """The rows that can have a gradient: with an advantage, or all of them where the loss has other terms (KL, entropy)."""
    return list(rows) if keep_flat else [r for r in rows if r.advantages.any()]
