"""Log-probs and entropies from hidden states in chunks, against log_softmax of full logits by autograd."""

import threading
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from agentrl.train.megatron.log_probs import VocabShard, add_product, chunk_size, parts, token_log_probs  # noqa: E402

N, H, V = 13, 8, 37
ONE_TOKEN, WHOLE = 1, 1 << 30
"""workspaces: chunks of one token, and one chunk"""


def inputs(dtype=torch.float64, padding=0, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(N, H, dtype=dtype, requires_grad=True)
    weight = (3 * torch.randn(V + padding, H, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, V, (N,))
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.01] * 4, dtype=dtype)[:N]
    return hidden, weight, labels, temperature


def full_logits(hidden, weight, labels, temperature):
    """What the function computes, from the logits of all tokens."""
    x = (hidden @ weight[:V].t() / temperature[:, None]).log_softmax(-1)
    return x.gather(1, labels[:, None])[:, 0], -(x.exp() * x).sum(-1)


def gradients(results, leaves, *, entropy=True):
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(N, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    total = (results[0] * factors[0]).sum()
    if entropy:
        total = total + (results[1] * factors[1]).sum()
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("workspace", [ONE_TOKEN, 5 * V * 32, WHOLE], ids=["tokens", "chunks", "whole"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("entropy", [True, False])
def test_chunks_equal_full_logits_in_fp64_with_their_gradients(workspace, padding, entropy):
    case = inputs(padding=padding)
    results = token_log_probs(*case, VocabShard(size=V), workspace=workspace)
    want = full_logits(*case)
    for got, value in zip(results, want, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-10)
    mine = gradients(results, case[:2], entropy=entropy)
    for got, value in zip(mine, gradients(want, case[:2], entropy=entropy), strict=True):
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-10)
    assert not mine[1][V:].any(), "padding has no gradient"


def test_in_fp32_the_error_is_that_of_rounding():
    case = inputs()
    single = [x.detach().float().requires_grad_() if x.is_floating_point() else x for x in case]
    results = token_log_probs(*single, VocabShard(size=V), workspace=ONE_TOKEN)
    want = full_logits(*case)
    for got, value in zip(results, want, strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), value, rtol=1e-4, atol=1e-4)
    for got, value in zip(gradients(results, single[:2]), gradients(want, case[:2]), strict=True):
        assert ((got - value).norm() / value.norm()) < 1e-5


def test_a_frozen_model_has_log_probs_without_gradients():
    case = [x.detach() for x in inputs()]
    got, _ = token_log_probs(*case, VocabShard(size=V), workspace=ONE_TOKEN)
    torch.testing.assert_close(got, full_logits(*case)[0])
    assert not got.requires_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadShard(VocabShard):
    """Reduces over threads, in place of a process group."""

    meeting: threading.Barrier
    values: dict = field(default_factory=dict)

    def reduce(self, x, op=torch.distributed.ReduceOp.SUM):
        self.values[self.start] = x.clone()
        self.meeting.wait(10)
        stacked = torch.stack([self.values[start] for start in sorted(self.values)])
        x.copy_(stacked.amax(0) if op == torch.distributed.ReduceOp.MAX else stacked.sum(0))
        self.meeting.wait(10)


@pytest.mark.parametrize("workspace", [ONE_TOKEN, WHOLE])
def test_ranks_with_a_part_of_the_vocabulary_agree_with_one_that_has_it_all(workspace):
    hidden, weight, labels, temperature = inputs(padding=3)
    want = full_logits(hidden, weight, labels, temperature)
    half, meeting, values, results = (V + 3) // 2, threading.Barrier(2), {}, {}

    def rank(number):
        start = number * half
        shard = ThreadShard(size=min(half, V - start), start=start, meeting=meeting, values=values)
        mine = [x.detach().clone().requires_grad_() for x in (hidden, weight[start : start + half])]
        out = token_log_probs(*mine, labels, temperature, shard, workspace=workspace)
        results[number] = (out, gradients(out, mine))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    of_hidden, of_weight = gradients(want, (hidden, weight))
    for number in range(2):
        out, (mine_hidden, mine_weight) = results[number]
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mine_hidden, of_hidden, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mine_weight, of_weight[number * half : (number + 1) * half], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("workspace", [ONE_TOKEN, WHOLE])
def test_the_gradient_of_a_bf16_weight_is_added_to_its_fp32_buffer(workspace):
    hidden, weight, labels, temperature = inputs(torch.bfloat16, padding=3)
    weight.main_grad = torch.full(weight.shape, 0.5)
    results = token_log_probs(hidden, weight, labels, temperature, VocabShard(size=V), workspace=workspace)
    (results[0].sum() + results[1].sum()).backward()
    double = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = full_logits(*double, labels, temperature.double())
    (want[0].sum() + want[1].sum()).backward()
    assert not weight.grad.any(), "autograd receives zeros, so that megatron's hook runs and adds nothing"
    got = weight.main_grad.double() - 0.5
    assert ((got - double[1].grad).norm() / double[1].grad.norm()) < 0.05
    assert ((hidden.grad - double[0].grad).norm() / double[0].grad.norm()) < 0.05


def test_a_chunk_fits_the_workspace():
    """bf16 logits on a CPU: the logits and three fp32 arrays of their size."""
    hidden = torch.zeros(1, H, dtype=torch.bfloat16)
    assert chunk_size(1000, hidden, 14 * 1000 * 10) == 10
    assert chunk_size(1000, hidden, 14 * 1000 * 600) == 512, "a multiple of 256"
    assert chunk_size(1000, hidden, 1) == 1


@pytest.mark.parametrize(
    ("tokens", "largest", "want"),
    [(6000, 2048, [2048, 2048, 1904]), (2100, 2048, [1280, 820]), (7, 3, [3, 3, 1]), (5, 9, [5])],
)
def test_chunks_are_few_and_of_about_equal_size(tokens, largest, want):
    assert [part.stop - part.start for part in parts(tokens, largest)] == want


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_logits_of_one_chunk_are_kept(chunks):
    """Of the products for each chunk (its logits, the same again, the gradient of the hidden states) one is left out once."""
    hidden, weight, labels, temperature = inputs()
    size = 12 // chunks
    case = hidden[:12], weight.detach(), labels[:12], temperature[:12]
    with FlopCounterMode(display=False) as counter:
        results = token_log_probs(*case, VocabShard(size=V), workspace=size * V * 32)
        results[0].sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.mm] == (3 * chunks - 1) * 2 * size * H * V


def test_the_gradient_can_be_taken_twice():
    case = inputs()
    results = token_log_probs(*case, VocabShard(size=V), workspace=5 * V * 32)
    first, second = (torch.autograd.grad(results[0].sum(), case[:2], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_tokens_beyond_a_chunk_take_no_more_memory():
    """The largest tensor of one chunk is the same for 8 chunks."""
    largest = []
    for chunks in (1, 8):
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            hidden = torch.randn(64 * chunks, 4, requires_grad=True)
            weight = torch.randn(2000, 4, requires_grad=True)
            labels = torch.zeros(len(hidden), dtype=torch.long)
            out = token_log_probs(
                hidden, weight, labels, torch.ones(len(hidden)), VocabShard(size=2000), workspace=64 * 2000 * 16
            )
            (out[0].sum() + out[1].sum()).backward()
        largest.append(max(e.cpu_memory_usage for e in profile.function_events))
    assert largest[1] <= 1.05 * largest[0]


def test_a_product_is_added_in_the_precision_of_the_sum():
    a, b, total = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16(), torch.full((5, 3), 2.0)
    add_product(total, a, b)
    torch.testing.assert_close(total, 2 + a.float() @ b.float(), rtol=0.02, atol=0.05)
