"""Rows as micro-batches of tensors, padded on the right.

The inputs are a matrix; the loss's tensors are flat and cover the chosen positions only. Most tokens of an agent's episode are observations,
for which no logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.train.base import Row
from agentrl.train.megatron.loss import TokenData


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded to one length. n is the number of chosen tokens."""

    inputs: Tensor
    """[b, s] int64: each row without its last token; 0 is padding"""
    index: Tensor
    """[n] int64: the positions that predict the chosen tokens, in the flattened [s, b]"""
    labels: Tensor
    """[n] int64: the chosen tokens"""
    temperature: Tensor
    """[n] fp32"""
    data: TokenData
    counts: tuple[int, ...]
    """number of chosen tokens of each row; n is their sum, or 1 where that is 0"""


def collate(
    rows: Sequence[Row], *, trained_only: bool, multiple: int = 1, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Pad rows into a micro-batch.

    Args:
        rows: may be empty; the result then is one row of padding with one chosen token of weight 0.
        trained_only: choose the tokens with a weight; otherwise all tokens but each row's first.
        multiple: the padded length is a multiple of this.
        device: the device of the tensors.
    """
    width = max((len(r.tokens) - 1 for r in rows), default=0)
    width = -(-max(width, 1) // multiple) * multiple
    inputs = np.zeros((max(len(rows), 1), width), np.int64)
    chosen = []
    for i, row in enumerate(rows):
        inputs[i, : max(len(row.tokens) - 1, 0)] = row.tokens[:-1]
        chosen.append(np.flatnonzero(row.weights) if trained_only else np.arange(1, max(len(row.tokens), 1)))
    counts = tuple(map(len, chosen))

    def tensor(array: np.ndarray, dtype: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device, non_blocking=True)

    if not sum(counts):
        zero = torch.zeros(1, device=device)
        return MicroBatch(
            inputs=tensor(inputs, np.int64),
            index=tensor(np.zeros(1), np.int64),
            labels=tensor(np.zeros(1), np.int64),
            temperature=tensor(np.ones(1), np.float32),
            data=TokenData(weights=zero, advantages=zero, rollout_log_probs=zero),
            counts=counts,
        )

    def flat(name: str, dtype: Any = np.float32) -> Tensor:
        return tensor(np.concatenate([getattr(r, name)[c] for r, c in zip(rows, chosen, strict=True)]), dtype)

    # a row that does not state it was sampled wherever it is trained, and nothing else counts
    sampled = [(r.weights != 0 if r.sampled is None else r.sampled)[c] for r, c in zip(rows, chosen, strict=True)]

    def optional(name: str) -> Tensor | None:
        return None if any(getattr(r, name) is None for r in rows) else flat(name)

    return MicroBatch(
        inputs=tensor(inputs, np.int64),
        index=tensor(np.concatenate([(c - 1) * len(inputs) + i for i, c in enumerate(chosen)]), np.int64),
        labels=flat("tokens", np.int64),
        temperature=flat("temperature"),
        data=TokenData(
            weights=flat("weights"),
            advantages=flat("advantages"),
            rollout_log_probs=flat("rollout_log_probs"),
            old_log_probs=optional("old_log_probs"),
            ref_log_probs=optional("ref_log_probs"),
            sampled=tensor(np.concatenate(sampled), np.bool_),
        ),
        counts=counts,
    )
