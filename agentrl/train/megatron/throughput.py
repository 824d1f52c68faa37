"""Model FLOPs utilisation (MFU) of optimizer steps. No torch.

FLOPs of one optimizer step are those of the matrix products of forward and backward pass, 2 for each multiply-add and three times the forward
pass in total, as in Chowdhery et al. 2022 (PaLM, appendix B), without recomputation:

    6 · P · tokens                  P: parameters of the layers' matrices (of a mixture of experts: those that a token uses)
    12 · L · A · keys               L layers; A = heads × head dimension (the mean of keys' and values', if they differ);
                                    keys: the tokens that each token attends to, itself included, summed
    6 · V · h · predictions         V: vocabulary, h: hidden size; predictions: tokens whose log-prob is computed

Where adapters alone are trained, no gradient of the other matrices is computed: 4 in place of 6, and 6 · (parameters of the adapters) · tokens.

Only tokens that are computed count, once each: a prefix that rows of a micro-batch share counts once, padding never. Norms, softmax, rotary
embeddings and the optimizer count nothing.

    MFU = FLOPs of the step / (seconds of the step × GPUs × peak FLOP/s of the GPU)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.train.base import Row
from agentrl.train.batch_plan import prefix_keys
from agentrl.train.megatron.model_config import ModelConfig
from agentrl.train.token_tree import common_prefixes, lexicographic_order

PEAK_FLOPS = {
    "H200": 990e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 990e12,
    "H800": 990e12,
    "GH200": 990e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "H20": 148e12,
}
"""Dense bf16 FLOP/s by a part of the GPU's name, from the manufacturer's data sheets; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The tokens of one optimizer step."""

    tokens: int
    """inputs of the model without padding (each row without its last token); shared prefixes once"""
    keys: int
    """for each token, the number of tokens that it attends to, itself included"""
    predictions: int
    """trained tokens"""


def row_work(rows: Sequence[Row]) -> Work:
    """The work of rows that share nothing."""
    lengths = [max(len(row.tokens) - 1, 0) for row in rows]
    return Work(
        tokens=sum(lengths),
        keys=sum(n * (n + 1) // 2 for n in lengths),
        predictions=sum(int(np.count_nonzero(row.weights)) for row in rows),
    )


def plan_work(rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], *, tree: bool) -> Work:
    """The work of rows in micro-batches.

    Args:
        rows: all rows.
        plan: row numbers by data-parallel rank and micro-batch.
        tree: rows of a micro-batch compute a prefix that they share once.
    """
    if not tree:
        return row_work(rows)
    tokens, keys = 0, 0
    for part in (part for parts in plan for part in parts):
        inputs = [keys[:-1] for keys in prefix_keys([rows[i] for i in part])]
        inputs = [inputs[i] for i in lexicographic_order(inputs)]
        for row, above in zip(inputs, common_prefixes(inputs), strict=True):
            tokens += len(row) - above
            keys += (len(row) * (len(row) + 1) - above * (above + 1)) // 2
    return Work(tokens=tokens, keys=keys, predictions=row_work(rows).predictions)


def layer_parameters(model: ModelConfig) -> int:
    """Parameters of the matrices of all layers that a token uses."""
    layers = int(model.transformer["num_layers"])
    return layers * _attention_parameters(model) + sum(_mlp_parameters(model, layer) for layer in range(layers))


def _attention_parameters(model: ModelConfig) -> int:
    shape, m = model.transformer, model.latent
    hidden, heads = int(shape["hidden_size"]), int(shape["num_attention_heads"])
    if m is None:
        return hidden * model.head_dim * (2 * heads + 2 * int(shape["num_query_groups"]))
    queries = hidden * heads * model.head_dim
    if m.query_rank is not None:
        queries = m.query_rank * (hidden + heads * model.head_dim)
    down = hidden * (m.key_value_rank + m.rotary_channels)
    up = m.key_value_rank * heads * (m.content_channels + m.value_channels)
    return queries + down + up + hidden * heads * m.value_channels


def _mlp_parameters(model: ModelConfig, layer: int) -> int:
    shape = model.transformer
    hidden = int(shape["hidden_size"])
    if not model.has_experts(layer):
        return 3 * hidden * int(shape["ffn_hidden_size"])
    width = shape["moe_router_topk"] * shape["moe_ffn_hidden_size"]
    width += shape.get("moe_shared_expert_intermediate_size") or 0
    return hidden * (3 * int(width) + model.experts)


def step_flops(model: ModelConfig, work: Work, adapters: int | None = None) -> float:
    """FLOPs of forward and backward pass; the formula is at the top of this module. `adapters`: see `mfu`."""
    shape = model.transformer
    channels = model.head_dim if model.latent is None else (model.head_dim + model.latent.value_channels) / 2
    attention = 12 * shape["num_layers"] * shape["num_attention_heads"] * channels
    trained, factor = (0, 6) if adapters is None else (adapters, 4)
    matrices = factor * layer_parameters(model) + 6 * trained
    head = factor * model.vocab_size * shape["hidden_size"]
    return float(matrices * work.tokens + attention * work.keys + head * work.predictions)


def peak_flops(device: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None: unknown, or a CPU."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in device), None)


def mfu(
    model: ModelConfig, work: Work, seconds: float, device: str, gpus: int, adapters: int | None = None
) -> float | None:
    """Model FLOPs utilisation of an optimizer step; None where the peak is not known.

    Args:
        model: the model's shape.
        work: what the step computed, on all GPUs together.
        seconds: duration of the step: forward, backward, reductions and optimizer.
        device: name of the GPU; empty: a CPU.
        gpus: number of GPUs.
        adapters: parameters of the adapters, if they alone are trained; None: all weights are.
    """
    peak = peak_flops(device)
    return None if peak is None else step_flops(model, work, adapters) / (seconds * gpus * peak)
