"""Causal grouped-query attention over a token tree: megatron-core's core attention, with or without Transformer Engine.

The calls of attention_blocks.py are run one by one, and a query's partial results are merged by their log-sum-exp:

    lse = log(exp lse_a + exp lse_b);   out = out_a exp(lse_a − lse) + out_b exp(lse_b − lse)

(Milakov & Gimelshein 2018, Online normalizer calculation for softmax). No key is copied for its descendants, and nothing but the merged
output and its log-sum-exp is kept for the backward pass. Under context parallelism keys and values are gathered over the ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.train.attention_blocks import Call, Range
from agentrl.train.megatron.attention_kernels import Kernel, Sequences, kernel_for
from agentrl.train.megatron.gpu_kernels import merge_attention, to_device
from agentrl.train.megatron.routing import RoutingPlan

Place = slice | Tensor
"""Where some tokens are in a packed tensor: one range, or their indices"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """One call, with its tensors on the device."""

    sequences: Sequences
    queries: Place
    """in this rank's tokens"""
    keys: Place
    """in the whole layout"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The attention of one micro-batch. megatron passes it on as `packed_seq_params`, also to recomputed layers."""

    calls: tuple[CallPlan, ...]
    """the first one is causal and holds every query once"""
    at_most_two: bool
    """no query and no key is in more than one of the other calls' blocks, so that at most two partial results are added up"""
    qkv_format: str = "tree"
    """not 'thd': megatron then leaves queries, keys and positions as they are"""
    cp_group: Any = None
    routing: RoutingPlan | None = None
    """for layers with experts (experts.py)"""


def attention_plan(calls: Sequence[Call], local: Sequence[Range], device: torch.device | str) -> AttentionPlan:
    """The plan of some calls whose queries are in the ranges `local` of the layout, packed one after the other."""
    offsets, packed = [], 0
    for start, stop in local:
        offsets.append((start, stop, packed - start))
        packed += stop - start

    def in_packed(span: Range) -> Range:
        shift = next(o for a, b, o in offsets if a <= span[0] < b)
        return span[0] + shift, span[1] + shift

    plans = []
    for call in calls:
        queries, keys = [in_packed(b.queries) for b in call.blocks], [b.keys for b in call.blocks]
        lengths = [tuple(b - a for a, b in spans) for spans in (queries, keys)]
        starts = [
            to_device(torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32), device) for x in lengths
        ]
        sequences = Sequences(
            causal=call.causal,
            query_lengths=lengths[0],
            key_lengths=lengths[1],
            query_starts=starts[0],
            key_starts=starts[1],
        )
        plans.append(CallPlan(sequences=sequences, queries=_place(queries, device), keys=_place(keys, device)))
    others = [block for call in calls[1:] for block in call.blocks]
    at_most_two = not (_overlap([b.queries for b in others]) or _overlap([b.keys for b in others]))
    return AttentionPlan(calls=tuple(plans), at_most_two=at_most_two)


def _overlap(spans: Sequence[Range]) -> bool:
    return any(a[1] > b[0] for a, b in pairwise(sorted(spans)))


def _place(spans: Sequence[Range], device: torch.device | str) -> Place:
    if all(a[1] == b[0] for a, b in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return to_device(torch.cat([torch.arange(a, b) for a, b in spans]), device)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, kernel: Kernel | None = None
) -> Tensor:
    """The attention of this rank's queries.

    Args:
        q: [n, heads, d].
        k: [m, groups, d], of the whole layout.
        v: [m, groups, d].
        plan: which queries attend to which keys.
        scale: factor of the scores.
        kernel: None: the one for the device and dtype of q.

    Returns:
        [n, heads, d], with gradient.
    """
    out: Tensor = _TreeAttention.apply(q, k, v, plan, scale, kernel or kernel_for(q))
    return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, kernel: Kernel) -> Tensor:
        first, *others = plan.calls
        out, lse = kernel.forward(q, k[first.keys], v[first.keys], first.sequences, scale)
        out = out.to(_sum_dtype(plan, q, lse))
        for call in others:
            part = kernel.forward(q[call.queries], k[call.keys], v[call.keys], call.sequences, scale)
            merge_attention(out, lse, call.queries, *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.kernel = plan, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()

        def part(call: CallPlan) -> tuple[Tensor, Tensor, Tensor]:
            rows, keys = call.queries, call.keys
            inputs = grad[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows]
            result: tuple[Tensor, Tensor, Tensor] = ctx.kernel.backward(*inputs, call.sequences, ctx.scale)
            return result

        first, *others = ctx.plan.calls
        dtype = _sum_dtype(ctx.plan, q, lse)
        dq, dk, dv = part(first)
        sums = dq.to(dtype), _spread(dk, first.keys, len(k), dtype), _spread(dv, first.keys, len(k), dtype)
        for call in others:
            for total, place, values in zip(sums, (call.queries, call.keys, call.keys), part(call), strict=True):
                _add(total, place, values)
        return *(x.to(q.dtype) for x in sums), None, None, None


def _sum_dtype(plan: AttentionPlan, q: Tensor, lse: Tensor) -> torch.dtype:
    """The precision in which partial results are added up. A sum of two is rounded once, also in the precision of `q`."""
    return q.dtype if plan.at_most_two else lse.dtype


def _spread(x: Tensor, place: Place, length: int, dtype: torch.dtype) -> Tensor:
    """A tensor of `length` tokens with `x` at `place` and 0 elsewhere."""
    if len(x) == length:
        return x.to(dtype)
    whole = torch.zeros(length, *x.shape[1:], dtype=dtype, device=x.device)
    whole[place] = x.to(dtype)
    return whole


def _add(total: Tensor, place: Place, values: Tensor) -> None:
    if isinstance(place, slice):
        total[place] += values
    else:
        total.index_add_(0, place, values.to(total.dtype))


class TreeAttention(nn.Module):
    """Core attention of this tensor-parallel rank's heads, for megatron's attention layer."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout or config.window_size is not None:
            raise NotImplementedError("TreeAttention supports neither dropout nor sliding windows")
        self.scale = softmax_scale or config.softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.context_parallel = config.context_parallel_size

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """query [s, 1, heads, d], key [s, 1, groups, d], value [s, 1, groups, w], of this context-parallel rank -> [s, 1, heads * w].

        w is at most d; kernels have one size for all, so narrower values are padded.
        """
        width, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
        # squeezed, not indexed: the gradient of an index is a copy
        q, k, v = query.squeeze(1), key.squeeze(1), (F.pad(value, (0, missing)) if missing else value).squeeze(1)
        if self.context_parallel > 1:
            k, v = gather_context(torch.cat([k, v], 1)).chunk(2, 1)
        out = tree_attention(q, k, v, packed_seq_params, self.scale)
        return (out[..., :width] if missing else out).flatten(1)[:, None]


def context_ranges(length: int, rank: int, size: int) -> list[Range]:
    """The parts of a layout that a context-parallel rank has: of 2 × `size` equal chunks, one from each end, which balances causal attention."""
    chunk = length // (2 * size)
    numbers = (rank, 2 * size - 1 - rank)
    return [(0, length)] if size == 1 else [(i * chunk, (i + 1) * chunk) for i in numbers]


def gather_context(x: Tensor) -> Tensor:
    """Tokens [s, …] of all context-parallel ranks in the order of the layout. The gradient is summed over the ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    group = parallel_state.get_context_parallel_group()
    size = group.size()
    chunks = gather_from_sequence_parallel_region(x.contiguous(), group=group).chunk(2 * size)
    # the gathered order is first and last chunk of rank 0, second and second-last of rank 1, …
    order = [2 * i for i in range(size)] + [2 * i + 1 for i in reversed(range(size))]
    return torch.cat([chunks[i] for i in order])
