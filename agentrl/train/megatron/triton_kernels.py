"""Triton kernels for what a transformer layer does between its matrix products: heads, RMS norm, SwiGLU, merging partial attention. For bf16 and
fp16 on a GPU.

Each is one pass over its inputs and one over its gradients; sums are in fp32 and results are rounded once. `gpu_kernels.py` decides where they
are used, and `tests/train/test_gpu.py` compares them with torch in fp32.
"""
# the kernels' arguments are pointers and compile-time constants, which mypy cannot check
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-not-found"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WAVES = 8
"""programs for each multiprocessor in kernels that keep a sum over rows"""


@triton.jit
def _heads_forward(
    mixed, q_weight, k_weight, cos, sin, q, k, v, scale, rows, per_group, groups, eps,
    norm: tl.constexpr, half: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """One program: `block_rows` heads of [tokens, groups, per_group, 2 · half]; the last two of a group are its key and its value."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    valid = row < rows
    column = tl.arange(0, half)
    slot = row % per_group
    group = (row // per_group) % groups
    token = row // (per_group * groups)
    is_key, is_value = slot == per_group - 2, slot == per_group - 1
    at = row[:, None].to(tl.int64) * (2 * half) + column
    x1 = tl.load(mixed + at, mask=valid[:, None], other=0.0).to(tl.float32)
    x2 = tl.load(mixed + at + half, mask=valid[:, None], other=0.0).to(tl.float32)
    c = tl.load(cos + token[:, None] * half + column, mask=valid[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * half + column, mask=valid[:, None], other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if norm:
        inverse = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * half) + eps)
        tl.store(scale + row, inverse, mask=valid)
        w1 = tl.where(is_key[:, None], tl.load(k_weight + column)[None], tl.load(q_weight + column)[None])
        w2 = tl.where(is_key[:, None], tl.load(k_weight + column + half)[None], tl.load(q_weight + column + half)[None])
        y1 = x1 * inverse[:, None] * w1.to(tl.float32)
        y2 = x2 * inverse[:, None] * w2.to(tl.float32)
    o1 = (y1 * c - y2 * s).to(mixed.dtype.element_ty)
    o2 = (y2 * c + y1 * s).to(mixed.dtype.element_ty)
    query = (token * groups + group) * (per_group - 2) + slot
    other = token * groups + group
    q_at = query[:, None].to(tl.int64) * (2 * half) + column
    kv_at = other[:, None].to(tl.int64) * (2 * half) + column
    to_q = (valid & ~is_key & ~is_value)[:, None]
    tl.store(q + q_at, o1, mask=to_q)
    tl.store(q + q_at + half, o2, mask=to_q)
    to_k = (valid & is_key)[:, None]
    tl.store(k + kv_at, o1, mask=to_k)
    tl.store(k + kv_at + half, o2, mask=to_k)
    to_v = (valid & is_value)[:, None]
    tl.store(v + kv_at, x1.to(mixed.dtype.element_ty), mask=to_v)
    tl.store(v + kv_at + half, x2.to(mixed.dtype.element_ty), mask=to_v)


@triton.jit
def _heads_backward(
    mixed, q_weight, k_weight, cos, sin, dq, dk, dv, scale, d_mixed, d_weight, pairs, per_group, groups,
    norm: tl.constexpr, half: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """The second axis of the grid is queries, keys, values; a program computes some blocks of them. `pairs`: tokens × groups."""
    kind = tl.program_id(1)
    grad, weight = dq, q_weight
    heads, first = per_group - 2, 0
    if kind == 1:
        grad, weight = dk, k_weight
    if kind == 2:
        grad = dv
    if kind > 0:
        heads, first = 1, per_group - 3 + kind
    column = tl.arange(0, half)
    sum1, sum2 = tl.zeros([block_rows, half], tl.float32), tl.zeros([block_rows, half], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(pairs * heads, block_rows), tl.num_programs(0)):
        head = block * block_rows + tl.arange(0, block_rows)
        valid = (head < pairs * heads)[:, None]
        pair = head // heads
        token = pair // groups
        row = pair * per_group + first + head % heads
        grad_at = head[:, None].to(tl.int64) * (2 * half) + column
        at = row[:, None].to(tl.int64) * (2 * half) + column
        g1 = tl.load(grad + grad_at, mask=valid, other=0.0).to(tl.float32)
        g2 = tl.load(grad + grad_at + half, mask=valid, other=0.0).to(tl.float32)
        if kind < 2:
            c = tl.load(cos + token[:, None] * half + column, mask=valid, other=0.0).to(tl.float32)
            s = tl.load(sin + token[:, None] * half + column, mask=valid, other=0.0).to(tl.float32)
            y1, y2 = g1 * c + g2 * s, g2 * c - g1 * s
            g1, g2 = y1, y2
            if norm:
                inverse = tl.load(scale + row, mask=head < pairs * heads, other=0.0)[:, None]
                h1 = tl.load(mixed + at, mask=valid, other=0.0).to(tl.float32) * inverse
                h2 = tl.load(mixed + at + half, mask=valid, other=0.0).to(tl.float32) * inverse
                sum1 += g1 * h1
                sum2 += g2 * h2
                g1 *= tl.load(weight + column).to(tl.float32)[None]
                g2 *= tl.load(weight + column + half).to(tl.float32)[None]
                mean = ((tl.sum(g1 * h1, 1) + tl.sum(g2 * h2, 1)) / (2 * half))[:, None]
                g1, g2 = (g1 - h1 * mean) * inverse, (g2 - h2 * mean) * inverse
        tl.store(d_mixed + at, g1.to(d_mixed.dtype.element_ty), mask=valid)
        tl.store(d_mixed + at + half, g2.to(d_mixed.dtype.element_ty), mask=valid)
    if norm:
        part = d_weight + (tl.program_id(0) * 3 + kind) * (2 * half) + column
        tl.store(part, tl.sum(sum1, 0))
        tl.store(part + half, tl.sum(sum2, 0))


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, norm: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, groups, per_group, width = mixed.shape
        q = mixed.new_empty(tokens, groups * (per_group - 2), width)
        k, v = (mixed.new_empty(tokens, groups, width) for _ in range(2))
        rows = tokens * groups * per_group
        scale = mixed.new_empty(rows if norm else 1, dtype=torch.float32)
        block = _rows(width)
        _heads_forward[(triton.cdiv(rows, block),)](
            mixed, q_weight, k_weight, cos, sin, q, k, v, scale, rows, per_group, groups, eps,
            norm=norm, half=width // 2, block_rows=block,
        )  # fmt: skip
        ctx.save_for_backward(mixed, q_weight, k_weight, cos, sin, scale)
        ctx.norm = norm
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q_weight, k_weight, cos, sin, scale = ctx.saved_tensors
        tokens, groups, per_group, width = mixed.shape
        pairs, block = tokens * groups, _rows(width) // 2
        programs = min(triton.cdiv(pairs * (per_group - 2), block), _programs(mixed))
        d_mixed = torch.empty_like(mixed)
        d_weight = mixed.new_empty(programs if ctx.norm else 0, 3, width, dtype=torch.float32)
        _heads_backward[(programs, 3)](
            mixed, q_weight, k_weight, cos, sin, *(g.contiguous() for g in grads), scale, d_mixed, d_weight,
            pairs, per_group, groups, norm=ctx.norm, half=width // 2, block_rows=block,
        )  # fmt: skip
        if not ctx.norm:
            return d_mixed, *(None,) * 6
        d_q, d_k, _ = d_weight.sum(0).to(q_weight.dtype)
        return d_mixed, d_q, d_k, *(None,) * 4


def split_heads(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, angles: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of the first matrix of attention into queries, keys and values; normalise and rotate queries and keys.

    Args:
        mixed: [s, groups, queries of a group + 2, d], d a power of two; the last two heads of a group are its key and its value.
        q_weight: [d], of the RMS norm of queries; None: no norm.
        k_weight: [d], of keys.
        angles: [s, …, d] of the rotary embedding of half and half channels.
        eps: of the norm.

    Returns:
        Queries [s, heads, d], keys and values [s, groups, d], with gradients.
    """
    half = angles.flatten(1)[:, : mixed.shape[-1] // 2]
    none = mixed.new_empty(0)
    weights = (none, none) if q_weight is None or k_weight is None else (q_weight, k_weight)
    norm = q_weight is not None
    result: tuple[Tensor, Tensor, Tensor] = _Heads.apply(
        mixed.contiguous(), *weights, half.cos().to(mixed.dtype), half.sin().to(mixed.dtype), eps, norm
    )
    return result


@triton.jit
def _norm_forward(x, weight, y, scale, rows, width, eps, columns: tl.constexpr, block_rows: tl.constexpr):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, columns)
    valid = (row < rows)[:, None] & (column < width)[None]
    at = row[:, None].to(tl.int64) * width + column
    value = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(scale + row, inverse, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + at, (value * inverse[:, None] * w).to(y.dtype.element_ty), mask=valid)


@triton.jit
def _norm_backward(
    grad, x, weight, scale, dx, d_weight, rows, width, blocks, columns: tl.constexpr, block_rows: tl.constexpr
):
    column = tl.arange(0, columns)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([columns], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = block * block_rows + tl.arange(0, block_rows)
        valid = (row < rows)[:, None] & inside[None]
        at = row[:, None].to(tl.int64) * width + column
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(x + at, mask=valid, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
        total += tl.sum(g * normal, 0)
        g *= w
        mean = (tl.sum(g * normal, 1) / width)[:, None]
        tl.store(dx + at, ((g - normal * mean) * inverse).to(dx.dtype.element_ty), mask=valid)
    tl.store(d_weight + tl.program_id(0) * width + column, total, mask=inside)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows, columns = x.numel() // width, triton.next_power_of_2(width)
        y = torch.empty_like(x)
        scale = x.new_empty(rows, dtype=torch.float32)
        block = _rows(columns)
        _norm_forward[(triton.cdiv(rows, block),)](
            x, weight, y, scale, rows, width, eps, columns=columns, block_rows=block, num_warps=_warps(columns)
        )
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        rows, columns = x.numel() // width, triton.next_power_of_2(width)
        block = _rows(columns)
        blocks = triton.cdiv(rows, block)
        programs = min(blocks, _programs(x))
        dx = torch.empty_like(x)
        d_weight = x.new_empty(programs, width, dtype=torch.float32)
        _norm_backward[(programs,)](
            grads[0].contiguous(), x, weight, scale, dx, d_weight, rows, width, blocks,
            columns=columns, block_rows=block, num_warps=_warps(columns),
        )  # fmt: skip
        return dx, d_weight.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang & Sennrich 2019) over the last dimension, with gradients."""
    y: Tensor = _RmsNorm.apply(x.contiguous(), weight, eps)
    return y


@triton.jit
def _swiglu_forward(x, y, count, width, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    valid = at < count
    gate_at = at + at // width * width
    gate = tl.load(x + gate_at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x + gate_at + width, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=valid)


@triton.jit
def _swiglu_backward(grad, x, dx, count, width, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    valid = at < count
    gate_at = at + at // width * width
    gate = tl.load(x + gate_at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x + gate_at + width, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    silu = gate * open_
    tl.store(dx + gate_at, (g * up * (open_ + silu * (1 - open_))).to(dx.dtype.element_ty), mask=valid)
    tl.store(dx + gate_at + width, (g * silu).to(dx.dtype.element_ty), mask=valid)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], width)
        _swiglu_forward[(triton.cdiv(y.numel(), 2048),)](x, y, y.numel(), width, block=2048)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad, dx = grads[0].contiguous(), torch.empty_like(x)
        width = x.shape[-1] // 2
        _swiglu_backward[(triton.cdiv(grad.numel(), 2048),)](grad, x, dx, grad.numel(), width, block=2048)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up of [..., 2f], gate first (Shazeer 2020, GLU variants improve transformer): [..., f], with gradient."""
    y: Tensor = _SwiGlu.apply(x.contiguous())
    return y


@triton.jit
def _merge_attention(
    out, lse, index, other_out, other_lse, merged_lse, start, rows, queries, heads, width, lse_stride, other_stride,
    indexed: tl.constexpr, columns: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """One program: `block_rows` heads of [queries, heads, width] of the other part. Several threads read the same log-sum-exps, so the merged ones
    are not written over them.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, columns)
    valid = row < rows
    inside = valid[:, None] & (column < width)[None]
    query, head = row // heads, row % heads
    place = (tl.load(index + query, mask=valid, other=0) if indexed else start + query).to(tl.int64)
    at = (place * heads + head)[:, None] * width + column
    before = tl.load(lse + head.to(tl.int64) * lse_stride + place, mask=valid, other=0.0)
    other = tl.load(other_lse + head.to(tl.int64) * other_stride + query, mask=valid, other=0.0)
    peak = tl.maximum(before, other)
    total = peak + tl.log(tl.exp(before - peak) + tl.exp(other - peak))
    tl.store(merged_lse + head.to(tl.int64) * queries + query, total, mask=valid)
    value = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(before - total)[:, None]
    part = tl.load(other_out + row[:, None].to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    value += part * tl.exp(other - total)[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def merge_attention(out: Tensor, lse: Tensor, place: slice | Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """See `gpu_kernels.merge_attention`."""
    assert out.is_contiguous()
    assert lse.stride(1) == other_lse.stride(1) == 1
    queries, heads, width = other_out.shape
    rows, columns = queries * heads, triton.next_power_of_2(width)
    index, start = (place, 0) if isinstance(place, Tensor) else (lse, place.start)
    merged_lse = lse.new_empty(heads, queries)
    block = _rows(columns)
    _merge_attention[(triton.cdiv(rows, block),)](
        out, lse, index, other_out.contiguous(), other_lse, merged_lse, start, rows, queries, heads, width,
        lse.stride(0), other_lse.stride(0), indexed=index is place, columns=columns, block_rows=block,
    )  # fmt: skip
    lse[:, place] = merged_lse


def _rows(columns: int) -> int:
    """Rows of a program, so that it works on about 4,096 values."""
    return max(1, 4096 // int(columns))


def _warps(columns: int) -> int:
    return 4 if columns <= 2048 else 8


def _programs(x: Tensor) -> int:
    return WAVES * torch.cuda.get_device_properties(x.device).multi_processor_count
