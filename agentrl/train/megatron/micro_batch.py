"""Rows padded on the right into micro-batches of tensors.

A micro-batch holds the inputs as a matrix, but everything the loss speaks of as flat arrays over the chosen positions only: most tokens
of an agent's episode are observations, and no logits are computed for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.train.base import Row
from agentrl.train.megatron.loss import TokenData


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded to one length. n is the number of chosen tokens."""

    inputs: Tensor
    """[b, s] int64: each row but its last token; 0 where padded"""
    index: Tensor
    """[n] int64: where the chosen tokens are predicted, in the flattened [s, b]"""
    labels: Tensor
    """[n] int64: the chosen tokens"""
    temperature: Tensor
    """[n] fp32"""
    data: TokenData
    counts: tuple[int, ...]
    """chosen tokens of each row; n is their sum, but 1 where that is 0"""


def collate(
    rows: Sequence[Row], *, trained_only: bool, multiple: int = 1, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Pad rows into a micro-batch.

    Args:
        rows: may be empty; then the result is one padded row whose only token has weight 0.
        trained_only: choose the tokens with a weight; else every token but each row's first.
        multiple: the padded length is a multiple of this.
        device: where the tensors go.
    """
    width = max((len(r.tokens) - 1 for r in rows), default=0)
    width = -(-max(width, 1) // multiple) * multiple
    inputs = np.zeros((max(len(rows), 1), width), np.int64)
    chosen = []
    for i, row in enumerate(rows):
        inputs[i, : max(len(row.tokens) - 1, 0)] = row.tokens[:-1]
        chosen.append(np.flatnonzero(row.weights) if trained_only else np.arange(1, max(len(row.tokens), 1)))
    counts = tuple(len(c) for c in chosen)
    if not sum(counts):
        zero, one = np.zeros(1, np.int64), np.ones(1, np.float32)
        padding, index, labels, temperature = _tensors([inputs, zero, zero, one], device)
        return MicroBatch(padding, index, labels, temperature, _nothing(device), counts)
    where = np.concatenate([(c - 1) * len(inputs) + i for i, c in enumerate(chosen)])

    def flat(name: str) -> np.ndarray:
        return np.concatenate([getattr(r, name)[c] for r, c in zip(rows, chosen, strict=True)])

    def optional(name: str) -> Tensor | None:
        return (
            None
            if any(getattr(r, name) is None for r in rows)
            else _tensors([flat(name).astype(np.float32)], device)[0]
        )

    weights, advantages, rollout = _tensors(
        [flat(n).astype(np.float32) for n in ("weights", "advantages", "rollout_log_probs")], device
    )
    data = TokenData(weights, advantages, rollout, optional("old_log_probs"), optional("ref_log_probs"))
    flats = flat("tokens").astype(np.int64), flat("temperature").astype(np.float32)
    padded, index, labels, temperature = _tensors([inputs, where, *flats], device)
    return MicroBatch(padded, index, labels, temperature, data, counts)


def _nothing(device: torch.device | str) -> TokenData:
    zero = torch.zeros(1, device=device)
    return TokenData(zero, zero, zero, None, None)


def _tensors(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True) for a in arrays]
