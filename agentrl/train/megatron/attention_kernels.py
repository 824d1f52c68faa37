"""Attention of many sequences in one call, forward and backward, with the log-sum-exp of every query: what merging partial attention needs.

On a GPU in half precision, torch's variable-length flash kernel, and cuDNN's for long causal sequences on Hopper and later cards, where it takes
half the time (H200, 4,096 tokens); on the CPU, torch's flash kernel for each sequence; else plain matrices. The
backward functions take the output and the log-sum-exp of the whole attention and the keys of one part of it, as in ring attention (Liu et al.
2023): the probability of a key is exp(score − log-sum-exp), whichever part it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten
LONG = 2048
"""Causal sequences of at least this many tokens are computed by cuDNN, where it is used."""
MULTIPLE = 256
"""cuDNN compiles a plan for each length, so lengths are rounded up to this. It costs at most 1.3 times the work, at `LONG` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where sequences of queries and keys begin and end in packed tensors."""

    causal: bool
    """the i-th query attends to the keys up to the i-th, and there are as many keys as queries; otherwise to all keys of its sequence"""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_starts: Tensor
    """[sequences + 1] int32, cumulative lengths, on the device of the queries"""
    key_starts: Tensor


class Kernel(Protocol):
    """An implementation. q [n, heads, d]; k and v [m, groups, d]; out as q; lse [heads, n]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, s: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp (fp32, fp64 for fp64)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


def kernel_for(q: Tensor) -> Kernel:
    """The implementation for a tensor's device and dtype."""
    if not q.is_cuda:
        return CpuFlash()
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8:  # the flash kernels take no other head size
        return Dense()
    return _hopper_kernel() if torch.cuda.get_device_capability(q.device) >= (9, 0) else CudaFlash()


@cache
def _hopper_kernel() -> Kernel:
    return LongSequences(CudaFlash(), Cudnn()) if torch.backends.cudnn.is_available() else CudaFlash()


class CudaFlash:
    """torch's variable-length flash attention (the kernels behind torch.nn.attention.varlen)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, s: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        out, lse, *_ = _aten._flash_attention_forward(q, k, v, *self._starts(s), 0.0, s.causal, False, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *self._starts(s), 0.0, s.causal, *no_dropout, scale=scale
        )
        return grads

    @staticmethod
    def _starts(s: Sequences) -> tuple[Tensor, Tensor, int, int]:
        # for queries of length 1 the kernel would return the log-sum-exp in another shape; the maximum may be larger than any length
        return s.query_starts, s.key_starts, max(2, *s.query_lengths), max(s.key_lengths)


class OneSequence(Protocol):
    """Causal attention of one sequence. q [1, heads, n, d]; k and v [1, groups, n, d]; out as q; lse [1, heads, n]."""

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""

    def causal_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


class Cudnn:
    """cuDNN's attention of one sequence."""

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `OneSequence`."""
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
        return out, lse[..., 0]

    def causal_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OneSequence`."""
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device).unbind()
        n = q.shape[2]
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], *no_dropout, None, None, None, n, n, 0.0, True, scale=scale
        )
        return grads


class LongSequences:
    """Long causal sequences one by one by one kernel, runs of other sequences by another.

    A long sequence is extended to a multiple of some length by whatever follows it in the packed tensor: no query sees what is after it. The
    queries after its end have a log-sum-exp that makes their probabilities, and with them their part of every gradient, 0.
    """

    def __init__(self, others: Kernel, long: OneSequence, *, least: int = LONG, multiple: int = MULTIPLE) -> None:
        self._others, self._long, self._least, self._multiple = others, long, least, multiple

    def forward(self, q: Tensor, k: Tensor, v: Tensor, s: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        if not self._has_long(s):
            return self._others.forward(q, k, v, s, scale)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
        for a, b, run in self._runs(s):
            if run is None:
                q_part, k_part, v_part = (self._extended(x, a, b) for x in (q, k, v))
                part, lse_part = self._long.causal(q_part, k_part, v_part, scale)
                out[a:b] = part[0].transpose(0, 1)[: b - a]
                lse[:, a:b] = lse_part[0][:, : b - a]
            else:
                out[a:b], lse[:, a:b] = self._others.forward(q[a:b], k[a:b], v[a:b], run, scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        if not self._has_long(s):
            return self._others.backward(grad, q, k, v, out, lse, s, scale)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for a, b, run in self._runs(s):
            if run is None:
                more = -(b - a) % self._multiple
                q_part, k_part, v_part, out_part, grad_part = (self._extended(x, a, b) for x in (q, k, v, out, grad))
                lse_part = pad(lse[:, a:b], (0, more), value=torch.finfo(lse.dtype).max / 2)[None]
                extended = self._long.causal_backward(grad_part, q_part, k_part, v_part, out_part, lse_part, scale)
                dq, dk, dv = (x[0].transpose(0, 1)[: b - a] for x in extended)
            else:
                queries = grad[a:b], q[a:b], k[a:b], v[a:b], out[a:b]
                dq, dk, dv = self._others.backward(*queries, lse[:, a:b], run, scale)
            for total, part in zip(grads, (dq, dk, dv), strict=True):
                total[a:b] = part
        return grads

    def _has_long(self, s: Sequences) -> bool:
        return s.causal and max(s.query_lengths) >= self._least

    def _runs(self, s: Sequences) -> Iterator[tuple[int, int, Sequences | None]]:
        """The tokens a to b of each long sequence, and of each run of others between them with its own sequences."""
        first = start = 0
        for long, group in groupby(s.query_lengths, lambda n: n >= self._least):
            lengths = tuple(group)
            if long:
                for n in lengths:
                    yield start, start + n, None
                    start += n
            else:
                starts = s.query_starts[first : first + len(lengths) + 1] - s.query_starts[first]
                run = Sequences(
                    causal=True, query_lengths=lengths, key_lengths=lengths, query_starts=starts, key_starts=starts
                )
                yield start, start + sum(lengths), run
                start += sum(lengths)
            first += len(lengths)

    def _extended(self, x: Tensor, a: int, b: int) -> Tensor:
        """[1, heads, n, d]: the tokens from a to b, and more up to a multiple."""
        end = a + -(-(b - a) // self._multiple) * self._multiple
        part = x[a:end] if end <= len(x) else pad(x[a:b], (0, 0, 0, 0, 0, end - b))
        return part.transpose(0, 1)[None]


class _BySequence:
    """One call for each sequence: tensors [1, heads, length, d] in and out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, s: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        repeats = q.shape[1] // k.shape[1]
        parts = [_split(x, n) for x, n in ((q, s.query_lengths), (k, s.key_lengths), (v, s.key_lengths))]
        outs, lses = [], []
        for q_part, k_part, v_part in zip(*parts, strict=True):
            out, lse = self.one(q_part, _repeat(k_part, repeats), _repeat(v_part, repeats), s.causal, scale)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        repeats, groups = q.shape[1] // k.shape[1], k.shape[1]
        by_query = zip(*(_split(x, s.query_lengths) for x in (grad, q, out)), strict=True)
        by_key = zip(*(_split(x, s.key_lengths) for x in (k, v)), strict=True)
        results = []
        for queries, keys, part in zip(by_query, by_key, lse.split(s.query_lengths, 1), strict=True):
            g, q_part, o = queries
            k_part, v_part = (_repeat(x, repeats) for x in keys)
            dq, dk, dv = (x[0] for x in self.one_backward(g, q_part, k_part, v_part, o, part[None], s.causal, scale))
            summed = [x.unflatten(0, (groups, repeats)).sum(1) if repeats > 1 else x for x in (dk, dv)]
            results.append([x.transpose(0, 1) for x in (dq, *summed)])
        dq, dk, dv = (torch.cat(parts) for parts in zip(*results, strict=True))
        return dq, dk, dv

    def one(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Output [1, heads, n, d] and log-sum-exp [1, heads, n]."""
        raise NotImplementedError

    def one_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        raise NotImplementedError


def _split(x: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    return [part.transpose(0, 1)[None] for part in x.split(lengths)]


def _repeat(x: Tensor, repeats: int) -> Tensor:
    return x.repeat_interleave(repeats, 1) if repeats > 1 else x


class CpuFlash(_BySequence):
    """torch's flash attention for the CPU (what scaled_dot_product_attention calls there)."""

    def one(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `_BySequence`."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def one_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `_BySequence`."""
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return grads


class Dense(_BySequence):
    """Plain matrices of scores, in fp32 or wider."""

    def one(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `_BySequence`."""
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse

    def one_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `_BySequence`."""
        p = (self._scores(q, k, causal, scale) - lse[..., None]).exp()
        g, o, q_wide, k_wide, v_wide = (x.to(p.dtype) for x in (grad, out, q, k, v))
        by_score = p * (g @ v_wide.mT - (g * o).sum(-1, keepdim=True)) * scale
        return (by_score @ k_wide).to(q.dtype), (by_score.mT @ q_wide).to(k.dtype), (p.mT @ g).to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * scale
        if causal:
            n = q.shape[2]
            above = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(above, float("-inf"))
        return scores
