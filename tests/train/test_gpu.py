"""The same ranks on a GPU: NCCL, fp32 and bf16, memory given back and taken again."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_log_probs, hf_model, make_model, make_rows
from test_megatron import check_gradients, check_log_probs, start
from test_model_families import make
from vision_models import Seeing, image_rows, make_vision_model, vision_model

from agentrl.train.attention_blocks import Large, attention_calls
from agentrl.train.base import LossConfig
from agentrl.train.megatron.attention_kernels import CudaFlash, Cudnn, Dense, LongSequences, Sequences, kernel_for
from agentrl.train.megatron.gpu_kernels import merge_attention
from agentrl.train.megatron.tree_attention import attention_plan, tree_attention
from agentrl.train.token_tree import token_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SIZES = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]


@pytest.mark.parametrize("tensor_parallel", SIZES)
def test_fp32_equals_transformers(tmp_path, tensor_parallel):
    model = make_model(tmp_path / "model", vocab=97)
    rows = make_rows(model, temperature=0.7, vocab=97)
    with start(model, tmp_path, megatron={"tensor_model_parallel_size": tensor_parallel}) as trainer:
        check_log_probs(trainer, hf_model(model), rows)
        check_gradients(trainer, hf_model(model), rows, tmp_path / "gradients", LossConfig(kl_loss_coef=0.1))


@pytest.mark.parametrize("tensor_parallel", SIZES)
def test_bf16_trains_and_survives_an_offload(tmp_path, tensor_parallel):
    model = make_model(tmp_path / "model")
    rows, hf = make_rows(model), hf_model(model)
    settings = {"tensor_model_parallel_size": tensor_parallel, "sequence_parallel": tensor_parallel > 1}
    with start(model, tmp_path, megatron=settings, dtype="bfloat16", reference=True) as trainer:
        for row, got in zip(rows, trainer.log_probs(rows), strict=True):
            with torch.no_grad():
                assert np.abs(got - hf_log_probs(hf, row).numpy()).mean() < 0.1
        losses = [trainer.step(rows, LossConfig(kind="sft"), 1e-2)["loss"] for _ in range(5)]
        before = trainer.log_probs(rows), trainer.log_probs(rows, reference=True)
        held = trainer.free_mib()
        trainer.offload()
        assert 0 < held <= trainer.free_mib()
        trainer.onload()
        after = trainer.log_probs(rows), trainer.log_probs(rows, reference=True)
        for a, b in zip(before, after, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        losses += [trainer.step(rows, LossConfig(kind="sft"), 1e-2)["loss"] for _ in range(5)]
        assert losses[-1] < losses[4] < losses[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_experts_train_in_bf16(tmp_path, family):
    model = make(tmp_path / family, family, hidden_size=64)
    rows, hf = make_rows(model), hf_model(model)
    with start(model, tmp_path, dtype="bfloat16") as trainer:
        for row, got in zip(rows, trainer.log_probs(rows), strict=True):
            with torch.no_grad():
                assert np.abs(got - hf_log_probs(hf, row).numpy()).mean() < 0.15
        losses = [trainer.step(rows, LossConfig(kind="sft"), 3e-3)["loss"] for _ in range(8)]
        assert losses[-1] < losses[4] < losses[0]


def test_a_model_of_images_trains_in_bf16_and_its_vision_tower_survives_an_offload(tmp_path):
    rope = {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 1e4}
    model = make_vision_model(tmp_path / "model", text_config={"num_attention_heads": 2, "rope_parameters": rope})
    rows = image_rows(model)
    reference = Seeing(vision_model(model), rows)
    with start(model, tmp_path, dtype="bfloat16", reference=True) as trainer:
        before = trainer.log_probs(rows)
        for row, got in zip(rows, before, strict=True):
            with torch.no_grad():
                assert np.abs(got - hf_log_probs(reference, row).numpy()).mean() < 0.1
        trainer.offload()
        trainer.onload()
        assert all(np.array_equal(a, b) for a, b in zip(before, trainer.log_probs(rows), strict=True))
        losses = [trainer.step(rows, LossConfig(kind="sft"), 3e-3)["loss"] for _ in range(8)]
        assert losses[-1] < losses[4] < losses[0]


@pytest.mark.parametrize(
    ("causal", "lengths", "key_lengths"),
    [
        (True, (4096, 4096), (4096, 4096)),
        (True, (2500, 40, 1024, 2300, 1), (2500, 40, 1024, 2300, 1)),
        (True, (2060,), (2060,)),
        (False, (7001,), (2048,)),
        (False, (5500, 40, 1100, 7700, 1), (3072, 1024, 1300, 2048, 70)),
    ],
)
def test_attention_of_long_and_short_sequences_equals_plain_matrices(causal, lengths, key_lengths):
    """cuDNN's and the flash kernel in bf16 against fp32; outputs, log-sum-exps and gradients."""
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    q, grad = (draw(sum(lengths), 16, 128) for _ in range(2))
    k, v = (draw(sum(key_lengths), 8, 128) for _ in range(2))
    starts = [
        torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda() for x in (lengths, key_lengths)
    ]
    s = Sequences(
        causal=causal, query_lengths=lengths, key_lengths=key_lengths, query_starts=starts[0], key_starts=starts[1]
    )
    want = Dense().forward(q, k, v, s, 0.1)
    half = [x.bfloat16() for x in (q, k, v, grad)]
    kernel = kernel_for(half[0])
    got = kernel.forward(*half[:3], s, 0.1)
    want_grads = Dense().backward(grad, q, k, v, *want, s, 0.1)
    got_grads = kernel.backward(half[3], *half[:3], *got, s, 0.1)
    for g, w in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        assert (g.float() - w).norm() <= 0.02 * w.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("width", [128, 80])
def test_attention_is_merged_as_by_plain_torch(dtype, indexed, width):
    """With many more programs than multiprocessors, so that a program that reads what another has written is found."""
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    out, other = draw(9001, 16, width).to(dtype), draw(5000, 16, width).bfloat16()
    lse, other_lse = 20 * draw(16, 9001), (20 * draw(16, 5120))[:, :5000]
    place = torch.randperm(9001, device="cuda")[:5000] if indexed else slice(3000, 8000)
    want = out.float(), lse.clone()
    merge_attention(*want, place, other.float(), other_lse)
    merge_attention(out, lse, place, other, other_lse)
    torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, want[0].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "attach"),
    [(4, (1700, 2200, 2700, 3200, 3700)), (16, (4096, 4600, 4700, 4800, 5000)), (16, (4096,) * 5)],
    ids=["the flash kernel", "many calls", "two calls"],
)
def test_the_attention_of_a_tree_in_bf16_equals_that_in_fp32(heads, attach):
    """Long and short branches of a long path, with rectangles for both kernels; outputs and gradients."""
    history, lengths = np.arange(5000), (1200, 30, 1100, 500, 1300)
    rows = [
        np.concatenate([history[:n], 10000 * (i + 1) + np.arange(m)])
        for i, (n, m) in enumerate(zip(attach, lengths, strict=True))
    ]
    tree = token_tree(rows)
    n = len(tree.tokens)
    plan = attention_plan(attention_calls(tree.paths, [(0, n)], large=Large(1 << 20, 512)), [(0, n)], "cuda")
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs, grad = [draw(n, size, 128).bfloat16() for size in (heads, heads // 2, heads // 2)], draw(n, heads, 128)
    kernel = LongSequences(CudaFlash(), Cudnn(), large=Large(1 << 20, 512))
    results = []
    for dtype, chosen in ((torch.float32, Dense()), (torch.bfloat16, kernel)):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        out = tree_attention(q, k, v, plan, 0.1, chosen)
        results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), grad.bfloat16().to(dtype))))
    for want, got in zip(*results, strict=True):
        assert (got.float() - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("groups", "repeats", "width"), [(8, 2, 128), (4, 7, 64), (1, 1, 256)])
def test_heads_are_split_normalised_and_rotated_as_by_plain_torch(norm, groups, repeats, width):
    from agentrl.train.megatron import triton_kernels

    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    mixed, angles = draw(1001, groups, repeats + 2, width), draw(1001, width // 2).repeat(1, 2) * 100
    weights = [1 + 0.1 * draw(width) for _ in range(2)]
    grads = [draw(1001, n, width) for n in (groups * repeats, groups, groups)]

    def plain(x, q_weight, k_weight):
        q, k, v = x.split([repeats, 1, 1], 2)
        parts = [q.flatten(1, 2), k[:, :, 0], v[:, :, 0]]
        for i, weight in enumerate((q_weight, k_weight)):
            y = torch.nn.functional.rms_norm(parts[i], (width,), weight, 1e-6) if norm else parts[i]
            first, second = y.chunk(2, -1)
            parts[i] = y * angles.cos()[:, None] + torch.cat([-second, first], -1) * angles.sin()[:, None]
        return parts

    def kernel(x, q_weight, k_weight):
        chosen = (q_weight, k_weight) if norm else (None, None)
        return triton_kernels.split_heads(x, *chosen, angles[:, None, None], 1e-6)

    check_against_fp32(plain, kernel, [mixed, *(weights if norm else [])], grads, extra=[] if norm else weights)


@pytest.mark.parametrize("shape", [(1001, 1, 2048), (77, 5120), (300, 3, 1536)])
def test_the_norm_of_hidden_states_equals_plain_torchs(shape):
    from agentrl.train.megatron import triton_kernels

    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs = [draw(*shape), 1 + 0.1 * draw(shape[-1])]
    check_against_fp32(
        lambda x, w: [torch.nn.functional.rms_norm(x, (shape[-1],), w, 1e-6)],
        lambda x, w: [triton_kernels.rms_norm(x, w, 1e-6)],
        inputs,
        [draw(*shape)],
    )


def test_swiglu_equals_plain_torchs():
    from agentrl.train.megatron import triton_kernels

    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def plain(x):
        gate, up = x.chunk(2, -1)
        return [torch.nn.functional.silu(gate) * up]

    check_against_fp32(plain, lambda x: [triton_kernels.swiglu(x)], [3 * draw(1001, 1, 6000)], [draw(1001, 1, 3000)])


def check_against_fp32(plain, kernel, inputs, grads, extra=()):
    """Outputs and gradients of a kernel in bf16 are within bf16's rounding of plain torch in fp32, in every tensor's largest value."""
    results = []
    for function, dtype in ((plain, torch.float32), (kernel, torch.bfloat16)):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        outputs = list(function(*leaves, *(x.to(dtype) for x in extra)))
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, [g.bfloat16().to(dtype) for g in grads])])
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape
        assert (got.float() - want).norm() <= 4e-3 * want.norm()
        assert (got.float() - want).abs().max() <= 2e-2 * want.abs().max()


def test_weight_gradients_are_added_in_the_matrix_product():
    from agentrl.train.megatron.gpu_kernels import add_weight_gradient

    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs, grad, total = draw(512, 96).bfloat16(), draw(512, 64).bfloat16(), draw(64, 96)
    want = total.double() + grad.double().t() @ inputs.double()
    add_weight_gradient(inputs, grad, total)
    assert (total - want).abs().max() < 1e-3
