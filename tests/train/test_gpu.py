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

from agentrl.train.base import LossConfig
from agentrl.train.megatron.attention_kernels import Dense, Sequences, kernel_for

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


@pytest.mark.parametrize("lengths", [(4096, 4096), (2500, 40, 1024, 2300, 1), (2060,)])
def test_attention_of_long_and_short_sequences_equals_plain_matrices(lengths):
    """cuDNN's and the flash kernel in bf16 against fp32; outputs, log-sum-exps and gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(lengths), heads, 128, device="cuda", generator=generator) for heads in (16, 8, 8, 16)
    )
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    s = Sequences(causal=True, query_lengths=lengths, key_lengths=lengths, query_starts=starts, key_starts=starts)
    want = Dense().forward(q, k, v, s, 0.1)
    half = [x.bfloat16() for x in (q, k, v, grad)]
    kernel = kernel_for(half[0])
    got = kernel.forward(*half[:3], s, 0.1)
    want_grads = Dense().backward(grad, q, k, v, *want, s, 0.1)
    got_grads = kernel.backward(half[3], *half[:3], *got, s, 0.1)
    for g, w in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        assert (g.float() - w).norm() <= 0.02 * w.norm()


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
