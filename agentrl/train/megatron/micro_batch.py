"""Rows as micro-batches of tensors: a token tree, packed without padding between rows.

The model computes every unique token once. The loss stays per row: its tensors are flat and cover the chosen tokens of the rows. Most tokens of
an agent's episode are observations, for which no logits are computed. Chosen tokens with the same context, id and temperature have the same
log-prob, which is computed once too (a prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.core.message_images import Image
from agentrl.train.attention_blocks import attention_calls
from agentrl.train.base import OPTIONAL_INPUTS, Row
from agentrl.train.batch_plan import padded_length, prefix_keys
from agentrl.train.megatron.gpu_kernels import to_device
from agentrl.train.megatron.image_layout import Grid, image_layout
from agentrl.train.megatron.loss import TokenData
from agentrl.train.megatron.routing import RoutingPlan, recorded_experts
from agentrl.train.megatron.tree_attention import AttentionPlan, attention_plan, context_ranges
from agentrl.train.token_tree import Path, token_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The images of one micro-batch."""

    images: tuple[Image, ...]
    """the different ones"""
    source: Tensor
    """[s] int64: for each token of this rank its place among the tokens of all these images; -1: text"""
    features: Tensor | None = None
    """[m, h]: the vision tower's output for the tokens of all images; None: not computed on this stage"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows as one token tree. s is the number of its tokens that this context-parallel rank has, u the number of predictions there."""

    inputs: Tensor
    """[1, s] int64: token ids; 0 is padding"""
    positions: Tensor
    """[s] int64: position of each token in its row; of a model of images [3, s], its time, height and width"""
    routing: RoutingPlan
    attention: AttentionPlan
    images: ImagePlan | None
    """None: there are none"""
    index: Tensor
    """[u] int64: the tokens of `inputs` from which the predictions are made"""
    labels: Tensor
    """[u] int64: the predicted tokens"""
    temperature: Tensor
    """[u] fp32"""
    prediction: Tensor
    """[n] int64: for each chosen token, its prediction"""
    data: TokenData
    """of the chosen tokens"""
    places: np.ndarray
    """[n]: for each chosen token, its number among those of all context-parallel ranks, row by row. n is at least 1: without chosen tokens
    there is one of weight 0, and `places` is empty."""


def collate(
    rows: Sequence[Row],
    *,
    trained_only: bool,
    tree: bool = True,
    multiple: int = 1,
    context: tuple[int, int] = (0, 1),
    share: float = 1.0,
    grid: Grid | None = None,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack rows into a micro-batch.

    Args:
        rows: may be empty; the result then is padding with one chosen token of weight 0.
        trained_only: choose the tokens with a weight; otherwise all tokens but each row's first.
        tree: compute a prefix that rows share once.
        multiple: the number of tokens of all context-parallel ranks is a multiple of this.
        context: rank and size of the context-parallel group.
        share: see `RoutingPlan.share`.
        grid: height and width of an image in tokens; None: the model takes no images.
        device: the device of the tensors.
    """
    layout = token_tree([keys[:-1] for keys in prefix_keys(rows)], share=tree)
    used = len(layout.tokens)
    length = padded_length(used, multiple)
    paths = list(layout.paths)
    if length > used:
        paths.append(Path(start=used, stop=length, end=length))
    local = context_ranges(length, *context)
    mine = np.concatenate([np.arange(a, b) for a, b in local])
    chosen = [r.chosen(trained_only=trained_only) for r in rows]
    sources = np.concatenate([where[c - 1] for where, c in zip(layout.rows, chosen, strict=True)] or [mine[:0]])
    in_packed = np.full(length, -1, np.int64)
    in_packed[mine] = np.arange(len(mine))
    here = in_packed[sources]
    places = np.flatnonzero(here >= 0)

    def tensor(array: Any, dtype: Any) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array, dtype)), device)

    def packed(array: np.ndarray, padding: int = 0) -> Tensor:
        widths = [(0, 0)] * (array.ndim - 1) + [(0, length - used)]
        return tensor(np.pad(array, widths, constant_values=padding)[..., mine], np.int64)

    tokens = np.zeros(used, np.int64)
    for row, where in zip(rows, layout.rows, strict=True):
        tokens[where] = row.tokens[:-1]
    positions, images = layout.positions, None
    if grid is not None:
        positions, sources_of, shown = image_layout(rows, layout.rows, used, grid)
        images = ImagePlan(images=shown, source=packed(sources_of, padding=-1)) if shown else None
    recorded = recorded_experts(rows, layout.rows, length, mine, device)
    index, labels, temperature, prediction = _predictions(rows, chosen, here, places)
    return MicroBatch(
        inputs=packed(tokens)[None],
        positions=packed(positions),
        routing=RoutingPlan(valid=tensor(mine < used, np.bool_), share=share, recorded=recorded),
        attention=attention_plan(attention_calls(paths, local), local, device),
        images=images,
        index=tensor(index, np.int64),
        labels=tensor(labels, np.int64),
        temperature=tensor(temperature, np.float32),
        prediction=tensor(prediction, np.int64),
        data=_token_data(rows, chosen, places, device),
        places=places,
    )


def _gathered(rows: Sequence[Row], chosen: Sequence[np.ndarray], places: np.ndarray, name: str) -> np.ndarray:
    return np.concatenate([getattr(r, name)[c] for r, c in zip(rows, chosen, strict=True)])[places]


def _predictions(
    rows: Sequence[Row], chosen: Sequence[np.ndarray], here: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Index, label and temperature of the different predictions, and the prediction of each chosen token."""
    if not len(places):
        return np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros(1, np.int64)
    index, labels = here[places], _gathered(rows, chosen, places, "tokens").astype(np.int64)
    temperature = _gathered(rows, chosen, places, "temperature")
    values, kind = np.unique(temperature, return_inverse=True)
    keys = (index * (labels.max() + 1) + labels) * len(values) + kind.reshape(-1)
    _, first, prediction = np.unique(keys, return_index=True, return_inverse=True)
    return index[first], labels[first], temperature[first], prediction.reshape(-1)


def _token_data(
    rows: Sequence[Row], chosen: Sequence[np.ndarray], places: np.ndarray, device: torch.device | str
) -> TokenData:
    """The loss's inputs of the chosen tokens at `places`; without any, of one token of weight 0."""
    if not len(places):
        zero = torch.zeros(1, device=device)
        present = [name for name in OPTIONAL_INPUTS if all(getattr(r, name) is not None for r in rows)]
        return TokenData(weights=zero, advantages=zero, rollout_log_probs=zero, **dict.fromkeys(present, zero))

    def tensor(values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)

    def flat(name: str) -> Tensor:
        return tensor(_gathered(rows, chosen, places, name).astype(np.float32))

    def optional(name: str) -> Tensor | None:
        return None if any(getattr(r, name) is None for r in rows) else flat(name)

    # a row that does not state it was sampled wherever it is trained, and nothing else counts
    sampled = [(r.weights != 0 if r.sampled is None else r.sampled)[c] for r, c in zip(rows, chosen, strict=True)]
    return TokenData(
        weights=flat("weights"),
        advantages=flat("advantages"),
        rollout_log_probs=flat("rollout_log_probs"),
        **{name: optional(name) for name in OPTIONAL_INPUTS},
        sampled=tensor(np.concatenate(sampled)[places]),
    )
