"""The same ranks on a GPU: NCCL, fp32 and bf16, memory given back and taken again."""

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_log_probs, hf_model, make_model, make_rows
from test_megatron import check_gradients, check_log_probs, start

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
