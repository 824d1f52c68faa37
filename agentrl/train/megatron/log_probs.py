"""Log-probabilities of labels and entropies from hidden states, without the logits of a whole micro-batch.

With z = W h the logits of a token, T its temperature, x = z / T and p = softmax(x):

    log p_y = x_y − log Σ_v exp x_v           ∂ log p_y / ∂x_v = [v = y] − p_v
    H = log Σ_v exp x_v − Σ_v p_v x_v          ∂ H / ∂x_v = −p_v (log p_v + H)

Tokens are processed in chunks whose logits fit `WORKSPACE_BYTES`. The forward pass keeps three numbers per token, and the logits of the last
chunk; the backward pass begins with that chunk, and computes the logits of the others again. With tensor parallelism each rank has some columns
of the vocabulary, and the ranks reduce a maximum and three sums per token, once per micro-batch.

On a GPU with Triton, `torch.compile` makes one kernel of the statistics and one of the gradient of a chunk, so that logits are read and
written in their own precision. Liger's fused linear cross entropy was the alternative: it computes the gradient in the forward pass, before a
policy loss knows its factors, on one rank and at one temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

WORKSPACE_BYTES = 1 << 30
"""Maximum size of a chunk's logits and what is computed from them."""
_ROWS = 256
"""Chunks of more tokens than this have a multiple of it, which fast matrix multiplications prefer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The columns of the vocabulary that a rank has."""

    size: int
    """columns without padding"""
    start: int = 0
    """index of the first column in the whole vocabulary"""
    group: Any = None
    """tensor-parallel process group; None: one rank"""

    def reduce(self, x: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Reduce over the group, in place."""
        if self.group is not None and self.group.size() > 1:
            torch.distributed.all_reduce(x, op=op, group=self.group)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    shard: VocabShard,
    *,
    workspace: int = WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels, and entropies, of softmax(hidden @ weightᵀ / temperature).

    A weight with a `main_grad` of another precision (megatron's fp32 buffer of a bf16 weight) receives its gradient there, added up in that
    precision; the gradient that autograd sees is then 0. With tensor parallelism the gradient of `hidden` is summed over the group.

    Args:
        hidden: [n, h].
        weight: [v, h], this rank's rows of the (padded) output weight.
        labels: [n], int64, ids of the whole vocabulary.
        temperature: [n], > 0.
        shard: which columns `weight` has.
        workspace: bytes that the logits of a chunk may take, with what is computed from them.

    Returns:
        Log-probs [n] and entropies [n], fp32 (fp64 for fp64 inputs), equal on all ranks of the group.

    Example:
        >>> shard = VocabShard(size=weight.shape[0])
        >>> log_probs, entropy = token_log_probs(hidden, weight, labels, torch.ones(len(labels)), shard)
    """
    log_probs, entropy = _LogProbs.apply(hidden, weight, labels, temperature.reciprocal(), shard, workspace)
    return log_probs, entropy


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        inverse_temperature: Tensor,
        shard: VocabShard,
        workspace: int,
    ) -> tuple[Tensor, Tensor]:
        statistics, _ = _kernels(hidden.is_cuda)
        columns = weight[: shard.size]
        column = labels - shard.start
        own = (column >= 0) & (column < shard.size)
        column = torch.where(own, column, 0)
        chunk = chunk_size(shard.size, hidden, workspace)
        results, logits = [], None
        for part in parts(len(hidden), chunk):
            logits = None  # freed before the next chunk's are allocated
            logits = hidden[part] @ columns.t()
            results.append(statistics(logits, column[part], own[part], inverse_temperature[part]))
        peak, total, moment, picked = _combine(torch.cat(results, 1), own, shard)
        log_total = total.log()
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden, weight, column, own, inverse_temperature, peak, total, entropy)
        ctx.logits = logits
        ctx.shard, ctx.chunk = shard, chunk
        ctx.set_materialize_grads(False)
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, column, own, inverse_temperature, peak, total, entropy = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        by_label, by_entropy = grads
        if by_label is None:
            by_label = torch.zeros_like(entropy)
        _, gradient = _kernels(hidden.is_cuda)
        columns = weight[: ctx.shard.size]
        hidden_grad = torch.empty_like(hidden)
        weight_grad = _WeightGradient(weight) if ctx.needs_input_grad[1] else None
        for part in reversed(parts(len(hidden), ctx.chunk)):
            if logits is None:
                logits = hidden[part] @ columns.t()
            of_entropy = None if by_entropy is None else by_entropy[part]
            place = column[part], own[part], inverse_temperature[part]
            gradient(logits, *place, peak[part], total[part], entropy[part], by_label[part], of_entropy)
            torch.mm(logits, columns, out=hidden_grad[part])
            if weight_grad is not None:
                weight_grad.add(logits, hidden[part])
            logits = None
        ctx.shard.reduce(hidden_grad)
        return hidden_grad, None if weight_grad is None else weight_grad.result(), None, None, None, None


def chunk_size(columns: int, hidden: Tensor, workspace: int) -> int:
    """The number of tokens whose logits, and what is computed from them, fit `workspace` bytes; at least 1."""
    size = hidden.element_size()
    bytes_per_logit = size if _compiles(hidden.is_cuda) else size + 3 * _precision(hidden).itemsize
    rows = max(1, workspace // (columns * bytes_per_logit))
    return rows // _ROWS * _ROWS or rows


def parts(tokens: int, chunk: int) -> list[slice]:
    """The fewest chunks of at most `chunk` tokens, of about equal size."""
    even = -(-tokens // -(-tokens // chunk))
    size = min(chunk, -(-even // _ROWS) * _ROWS)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _combine(results: Tensor, own: Tensor, shard: VocabShard) -> tuple[Tensor, ...]:
    """Statistics of the whole vocabulary from those of each rank's columns, which are relative to its own maximum."""
    local, total, moment, picked = results
    peak = local.clone()
    shard.reduce(peak, ReduceOp.MAX)
    shift = local - peak
    scale = shift.exp()
    sums = torch.stack([total * scale, (moment + shift * total) * scale, torch.where(own, picked + shift, 0.0)])
    shard.reduce(sums)
    return peak, *sums


class _WeightGradient:
    """Adds up the gradient of the output weight over chunks."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        main_grad = getattr(weight, "main_grad", None)
        self._main_grad = main_grad if main_grad is not None and main_grad.dtype is not weight.dtype else None
        self._sum: Tensor | None = None

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add the gradient of one chunk: `grad` [n, v] of the logits, `hidden` [n, h]."""
        if self._main_grad is not None:
            add_product(self._main_grad[: grad.shape[1]], grad.t(), hidden)
        elif self._sum is None:
            self._sum = grad.t() @ hidden
        else:
            self._sum.addmm_(grad.t(), hidden)

    def result(self) -> Tensor | None:
        """What autograd receives. A gradient in `main_grad` is announced by zeros, for which megatron's hook waits."""
        if self._main_grad is not None:
            return self._weight.new_zeros(()).expand_as(self._weight)
        if self._sum is None:
            return None
        padding = self._weight.shape[0] - self._sum.shape[0]
        return torch.cat([self._sum, self._sum.new_zeros(padding, self._sum.shape[1])]) if padding else self._sum


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` is fp32 and `a` and `b` are of lower precision; one kernel on a GPU."""
    if total.is_cuda and _adds_mixed_products():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@cache
def _adds_mixed_products() -> bool:
    """Whether torch multiplies bf16 matrices into an fp32 sum on this GPU."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    total = torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


# -- the logits of one chunk: [n, v] -----------------------------------------------------------------------------------


def _statistics(logits: Tensor, column: Tensor, own: Tensor, inverse_temperature: Tensor, *, fused: bool) -> Tensor:
    """[4, n]: maximum, Σ exp, Σ x exp and the label's x, of x less its maximum. `fused`: in a form of which one kernel can be made."""
    x = logits.to(_precision(logits)) * inverse_temperature[:, None]
    peak = x.amax(-1)
    x -= peak[:, None]
    picked = torch.where(own, x.gather(1, column[:, None])[:, 0], 0.0)
    p = x.exp()
    moment = (p * x).sum(-1) if fused else (p[:, None] @ x[:, :, None])[:, 0, 0]
    return torch.stack([peak, p.sum(-1), moment, picked])


def _gradient(
    logits: Tensor,
    column: Tensor,
    own: Tensor,
    inverse_temperature: Tensor,
    peak: Tensor,
    total: Tensor,
    entropy: Tensor,
    by_label: Tensor,
    by_entropy: Tensor | None,
    *,
    fused: bool,
) -> None:
    """Replace logits by their gradient, from the gradients of log-probs and entropies."""
    p = logits.to(_precision(logits)) * inverse_temperature[:, None]
    p = ((p - peak[:, None]).exp() if fused else p.sub_(peak[:, None]).exp_()) / total[:, None]
    grad = p * -(by_label if by_entropy is None else by_label + by_entropy * entropy)[:, None]
    if by_entropy is not None:
        grad = grad - torch.special.xlogy(p, p) * by_entropy[:, None]
    of_label = (by_label * own)[:, None]
    if fused:
        grad = grad + torch.where(torch.arange(grad.shape[1], device=grad.device) == column[:, None], of_label, 0.0)
    else:
        grad.scatter_add_(1, column[:, None], of_label)
    logits.copy_(grad * inverse_temperature[:, None])


@cache
def _compiles(cuda: bool) -> bool:
    return cuda and find_spec("triton") is not None


@cache
def _kernels(cuda: bool) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """`_statistics` and `_gradient`, compiled where that is possible."""
    fused = _compiles(cuda)

    def statistics(*args: Any) -> Tensor:
        return _statistics(*args, fused=fused)

    def gradient(*args: Any) -> None:
        _gradient(*args, fused=fused)

    return (torch.compile(statistics), torch.compile(gradient)) if fused else (statistics, gradient)
