"""Attention of many sequences in one call, forward and backward, with the log-sum-exp of every query: what merging partial attention needs.

On a GPU in half precision, torch's variable-length flash kernel, and cuDNN's for long sequences on Hopper and later cards, where it takes
half the time (H200, 4,096 tokens); on the CPU, torch's flash kernel for each sequence; else plain matrices. The
backward functions take the output and the log-sum-exp of the whole attention and the keys of one part of it, as in ring attention (Liu et al.
2023): the probability of a key is exp(score − log-sum-exp), whichever part it is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.train.attention_blocks import LARGE, Large

_aten = torch.ops.aten
LONG = 2048
"""Causal sequences of at least this many tokens are computed by cuDNN, where it is used."""
ROUNDING = 256
"""cuDNN compiles a plan for each length, so lengths are rounded up to this. It costs at most 1.3 times the work, at `LONG` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
        state = _no_dropout(q.device, torch.uint64)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *self._starts(s), 0.0, s.causal, state, state, scale=scale
        )
        return grads

    @staticmethod
    def _starts(s: Sequences) -> tuple[Tensor, Tensor, int, int]:
        # for queries of length 1 the kernel would return the log-sum-exp in another shape; the maximum may be larger than any length
        return s.query_starts, s.key_starts, max(2, *s.query_lengths), max(s.key_lengths)


@cache
def _no_dropout(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[2] zeros: the state of a random generator, which is not used."""
    return torch.zeros(2, dtype=dtype, device=device)


class OneSequence(Protocol):
    """Attention of one sequence. q [1, heads, n, d]; k and v [1, groups, m, d]; out as q; lse [1, heads, n]."""

    def one(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""

    def one_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


class Cudnn:
    """cuDNN's attention of one sequence."""

    def one(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `OneSequence`."""
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse[..., 0]

    def one_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OneSequence`."""
        state = _no_dropout(q.device, torch.int64).unbind()
        sizes = q.shape[2], k.shape[2]
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], *state, None, None, None, *sizes, 0.0, causal, scale=scale
        )
        return grads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A long sequence, or a run of others."""

    queries: slice
    keys: slice
    others: Sequences | None
    """None: it is one long sequence"""


class LongSequences:
    """Long sequences one by one by one kernel, runs of other sequences by another.

    The queries of a long sequence are extended to a multiple of some length by whatever follows them in the packed tensor; they have a
    log-sum-exp that makes their probabilities, and with them their part of every gradient, 0. In a causal sequence the keys are extended too,
    as no query sees what is after it.

    Args:
        others: the kernel for runs.
        long: the kernel for long sequences.
        least: tokens of a long causal sequence.
        rounding: what its length is rounded up to.
        large: says which other sequences are long; their queries are rounded up to its multiple, of which their keys must be one.
    """

    def __init__(
        self, others: Kernel, long: OneSequence, *, least: int = LONG, rounding: int = ROUNDING, large: Large = LARGE
    ) -> None:
        self._others, self._long, self._least, self._rounding, self._large = others, long, least, rounding, large
        self._runs = lru_cache(maxsize=64)(self._runs_of)  # layers ask for the same few

    def forward(self, q: Tensor, k: Tensor, v: Tensor, s: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        parts = [self._forward(run, q, k, v, s.causal, scale) for run in self._runs(s)]
        out, lse = zip(*parts, strict=True)
        return _joined(out, 0), _joined(lse, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        parts = [self._backward(run, grad, q, k, v, out, lse, s.causal, scale) for run in self._runs(s)]
        dq, dk, dv = (_joined(x, 0) for x in zip(*parts, strict=True))
        return dq, dk, dv

    def _forward(self, run: _Run, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if run.others is not None:
            return self._others.forward(q[run.queries], k[run.keys], v[run.keys], run.others, scale)
        n = run.queries.stop - run.queries.start
        step = self._rounding if causal else self._large.multiple
        q, k, v = _extended(q, run.queries, step), _extended(k, run.keys, step), _extended(v, run.keys, step)
        out, lse = self._long.one(q, k, v, causal, scale)
        return out[0].transpose(0, 1)[:n], lse[0][:, :n]

    def _backward(
        self,
        run: _Run,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse[:, run.queries]
        if run.others is not None:
            grad, q, out = (x[run.queries] for x in (grad, q, out))
            return self._others.backward(grad, q, k[run.keys], v[run.keys], out, lse, run.others, scale)
        step = self._rounding if causal else self._large.multiple
        grad, q, out = (_extended(x, run.queries, step) for x in (grad, q, out))
        k, v = (_extended(x, run.keys, step) for x in (k, v))
        more = q.shape[2] - lse.shape[1]
        lse = pad(lse, (0, more), value=torch.finfo(lse.dtype).max / 2)[None].contiguous()
        lengths = [x.stop - x.start for x in (run.queries, run.keys, run.keys)]
        grads = self._long.one_backward(grad, q, k, v, out, lse, causal, scale)
        dq, dk, dv = (x[0].transpose(0, 1)[:n] for x, n in zip(grads, lengths, strict=True))
        return dq, dk, dv

    def _is_long(self, causal: bool, queries: int, keys: int) -> bool:
        return queries >= self._least if causal else self._large.has(queries, keys)

    def _runs_of(self, s: Sequences) -> list[_Run]:
        """The sequences in their order: each long one alone, the others between them together."""
        runs = []
        lengths = zip(s.query_lengths, s.key_lengths, strict=True)
        first = q = k = 0
        for long, group in groupby(lengths, lambda x: self._is_long(s.causal, *x)):
            sizes = tuple(group)
            for run in [(x,) for x in sizes] if long else [sizes]:
                query_lengths, key_lengths = zip(*run, strict=True)
                ends = q + sum(query_lengths), k + sum(key_lengths)
                others = None if long else _part(s, first, query_lengths, key_lengths)
                runs.append(_Run(queries=slice(q, ends[0]), keys=slice(k, ends[1]), others=others))
                first, q, k = first + len(run), *ends
        return runs


def _extended(x: Tensor, span: slice, multiple: int) -> Tensor:
    """[1, heads, n, d]: the tokens of `span`, and more up to a multiple."""
    missing = -(span.stop - span.start) % multiple
    end = span.stop + missing
    part = x[span.start : end] if end <= len(x) else pad(x[span], (0, 0, 0, 0, 0, missing))
    return part.transpose(0, 1)[None]


def _part(s: Sequences, first: int, query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> Sequences:
    """Consecutive sequences of `s`, from number `first` on."""
    if len(query_lengths) == len(s.query_lengths):
        return s
    places = slice(first, first + len(query_lengths) + 1)
    return Sequences(
        causal=s.causal,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        query_starts=s.query_starts[places] - s.query_starts[first],
        key_starts=s.key_starts[places] - s.key_starts[first],
    )


def _joined(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


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
