"""Attention over a tree equals attention over each row alone, forward and backward, in fp64; with every kernel that runs here."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_examples import examples

from agentrl.train.attention_blocks import Large, attention_calls
from agentrl.train.megatron.attention_kernels import CpuFlash, CudaFlash, Dense, LongSequences, kernel_for
from agentrl.train.megatron.tree_attention import attention_plan, context_ranges, tree_attention
from agentrl.train.token_tree import token_tree

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.3


class OneBy(Dense):
    """In place of cuDNN's kernel. Reads all queries and keys it is given, also those after the end of the sequence."""

    def one(self, q, k, v, causal, scale):
        return super().one(q, *(x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)), causal, scale)

    def one_backward(self, grad, q, k, v, out, lse, causal, scale):
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        dq, *others = super().one_backward(grad, q, k, v, out, lse, causal, scale)
        return dq, *(x.unflatten(1, (GROUPS, -1)).sum(2) for x in others)


KERNELS = {
    "flash": CpuFlash(),
    "dense": Dense(),
    "long": LongSequences(CpuFlash(), OneBy(), least=1, rounding=4, large=Large(1, 2)),
    "long and short": LongSequences(Dense(), OneBy(), least=4, rounding=5, large=Large(9, 3)),
}
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=8).map(
    lambda rows: [np.array(r, int) for r in rows]
)


def one_row(q, k, v):
    """Attention of one row, written out."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def tensors(n, dtype=torch.float64):
    shapes = [(n, HEADS, DIM), (n, GROUPS, DIM), (n, GROUPS, DIM)]
    return [torch.randn(s, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


@given(ROWS, st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from(list(KERNELS)))
@examples(60)
def test_a_tree_equals_its_rows(rows, share, size, kernel):
    """Outputs and gradients, relative error at most 1e-10, also where context-parallel ranks have parts of the layout."""
    tree = token_tree(rows, share=share)
    n = len(tree.tokens)
    padded = -(-n // (2 * size)) * 2 * size
    paths = [*tree.paths, *token_tree([np.zeros(padded - n, int)]).paths]
    if padded > n:
        last = paths.pop()
        paths.append(type(last)(start=n, stop=padded, end=padded))
    q, k, v = (x.requires_grad_() for x in tensors(padded))
    weights = [torch.randn(len(w), HEADS, DIM, dtype=q.dtype) for w in tree.rows]
    pieces, places = [], []
    for rank in range(size):
        local = context_ranges(padded, rank, size)
        plan = attention_plan(attention_calls(paths, local, large=Large(9, 3)), local, "cpu")
        mine = torch.cat([torch.arange(a, b) for a, b in local])
        pieces.append(tree_attention(q[mine], k, v, plan, SCALE, KERNELS[kernel]))
        places.append(mine)
    out = torch.cat(pieces)[torch.cat(places).argsort()]
    indices = [torch.from_numpy(w) for w in tree.rows]
    want = [one_row(q[w], k[w], v[w]) for w in indices]
    for w, expected in zip(indices, want, strict=True):
        torch.testing.assert_close(out[w], expected, rtol=1e-10, atol=1e-12)
    got_loss = sum((out[w] * x).sum() for w, x in zip(indices, weights, strict=True))
    want_loss = sum((x * y).sum() for x, y in zip(want, weights, strict=True))
    for a, b in zip(gradients(got_loss, (q, k, v)), gradients(want_loss, (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


HISTORY = np.arange(60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("step", [0, 3], ids=["two calls", "many calls"])
def test_the_precision_of_lower_dtypes(dtype, step):
    """Partial results are added in fp32: a tree of bf16 has the error of one rounding, not of one for each call."""
    rows = [np.concatenate([HISTORY[: step * t + 3], 100 * (t + 1) + np.arange(5)]) for t in range(20)]
    tree = token_tree(rows)
    q, k, v = (x.requires_grad_() for x in tensors(len(tree.tokens)))
    local = [(0, len(tree.tokens))]
    plan = attention_plan(attention_calls(tree.paths, local), local, "cpu")
    assert plan.at_most_two == (step == 0)
    want = tree_attention(q, k, v, plan, SCALE)
    got = tree_attention(q.to(dtype), k.to(dtype), v.to(dtype), plan, SCALE)
    weight = torch.randn_like(want)
    bound = 4 * torch.finfo(dtype).eps
    for a, b in zip(
        (got, *gradients((got * weight).sum(), (q, k, v))),
        (want, *gradients((want * weight).sum(), (q, k, v))),
        strict=True,
    ):
        assert (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize(("keys", "want"), [(8, [(True, 15, 15), (False, 12, 8)]), (9, [(True, 15, 15)]), (4, [])])
def test_large_rectangles_go_to_the_kernel_for_long_sequences(keys, want):
    """10 queries, extended to a multiple of 4, of which the number of keys must be one; a path of 14 tokens is extended to 15."""
    asked = []

    class Noted(OneBy):
        def one(self, q, k, v, causal, scale):
            asked.append((causal, q.shape[2], k.shape[2]))
            return super().one(q, k, v, causal, scale)

    rows = [np.concatenate([np.arange(keys), 100 * (t + 1) + np.arange(5)]) for t in range(3)]
    tree = token_tree(rows)
    local = [(0, len(tree.tokens))]
    large = Large(80, 4)
    plan = attention_plan(attention_calls(tree.paths, local, large=large), local, "cpu")
    kernel = LongSequences(Dense(), Noted(), least=13, rounding=5, large=large)
    tree_attention(*tensors(len(tree.tokens)), plan, SCALE, kernel)
    assert asked == want


def test_large_rectangles_are_calls_of_their_own():
    """Of two trees, so that queries and keys are ranges and nothing is gathered."""
    rows = [
        np.concatenate([100 * tree + np.arange(8), 1000 * (t + 1) + np.arange(5)]) for tree in (1, 2) for t in range(3)
    ]
    tree = token_tree(rows)
    local = [(0, len(tree.tokens))]
    plan = attention_plan(attention_calls(tree.paths, local, large=Large(80, 4)), local, "cpu")
    assert [(c.queries, c.keys) for c in plan.calls[1:]] == [
        (slice(13, 23), slice(0, 8)),
        (slice(36, 46), slice(23, 31)),
    ]
    assert plan.at_most_two


def test_padding_of_any_length_gives_finite_numbers():
    local = [(0, 5)]
    plan = attention_plan(attention_calls(token_tree([np.zeros(5, int)]).paths, local), local, "cpu")
    q, k, v = (torch.zeros_like(x) for x in tensors(5))
    assert torch.isfinite(tree_attention(q, k, v, plan, SCALE)).all()


def test_the_kernel_follows_device_and_dtype():
    assert isinstance(kernel_for(torch.zeros(1)), CpuFlash)


def test_the_calls_of_the_gpu_kernel_fit_its_signature():
    """On the meta device, which computes shapes only; one branch has a single token."""
    rows = [np.concatenate([np.arange(20 + 3 * i), 100 * i + 100 + np.arange(4 if i else 1)]) for i in range(5)]
    tree = token_tree(rows)
    local = [(0, len(tree.tokens))]
    plan = attention_plan(attention_calls(tree.paths, local), local, "meta")
    q, k, v = (x.to("meta", torch.bfloat16).requires_grad_() for x in tensors(len(tree.tokens)))
    out = tree_attention(q, k, v, plan, SCALE, CudaFlash())
    assert out.shape == q.shape
    assert [x.shape for x in gradients(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_context_ranges_are_a_partition_with_both_ends_on_one_rank():
    for size in (1, 2, 4):
        parts = [context_ranges(16, rank, size) for rank in range(size)]
        assert sorted(i for p in parts for a, b in p for i in range(a, b)) == list(range(16))
        assert parts[0][0][0] == 0
        assert parts[0][-1][1] == 16
