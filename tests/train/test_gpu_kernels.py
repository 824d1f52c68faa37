"""The replacements of megatron's fallbacks, against megatron's own on a CPU."""

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from megatron.core import utils
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from agentrl.train.megatron import gpu_kernels


def test_the_norm_is_that_of_all_tensors_together():
    tensors = [[torch.randn(5), torch.randn(3, 4)]]
    got, _ = gpu_kernels.norm_of_all(0, torch.zeros(1), tensors, False)
    want = torch.cat([t.flatten() for t in tensors[0]]).norm()
    torch.testing.assert_close(got, want[None])


def test_scaling_equals_megatrons():
    tensors = [torch.randn(5), torch.randn(3, 4)]
    mine, theirs = [t.clone() for t in tensors], [t.clone() for t in tensors]
    gpu_kernels.scale_all(0, torch.zeros(1), [mine, mine], 0.3)
    utils.local_multi_tensor_scale(0, torch.zeros(1), [theirs, theirs], 0.3)
    torch.testing.assert_close(mine, theirs)
    apart = [torch.zeros(5), torch.zeros(3, 4)]
    gpu_kernels.scale_all(0, torch.zeros(1), [tensors, apart], 0.3)
    torch.testing.assert_close(apart, theirs)


@pytest.mark.parametrize(("width", "interleaved"), [(16, False), (8, False), (16, True), (8, True)])
def test_rotation_equals_megatrons_with_its_gradient(width, interleaved):
    t = torch.randn(7, 2, 3, 16, dtype=torch.float64, requires_grad=True)
    freqs = torch.randn(7, 1, 1, width, dtype=torch.float64)
    options = {"mscale": 1.5, "rotary_interleaved": interleaved}
    results = gpu_kernels.rotate(t, freqs, **options), _apply_rotary_pos_emb_bshd(t, freqs, **options)
    factor = torch.randn_like(t)
    gradients = [torch.autograd.grad((r * factor).sum(), t)[0] for r in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_other_rotations_are_refused():
    with pytest.raises(NotImplementedError, match="latent attention"):
        gpu_kernels.rotate(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), multi_latent_attention=True)


class Cuda(torch.nn.Parameter):
    """A parameter that says it is on a GPU."""

    is_cuda = True


def test_only_parameters_of_a_gpu_get_the_fused_kernel():
    class Part:
        def __init__(self, parameter):
            self.optimizer = torch.optim.AdamW([parameter])

    class Chain:
        chained_optimizers = [Part(Cuda(torch.ones(1))), Part(torch.nn.Parameter(torch.ones(1)))]

    gpu_kernels.use_fused_adam(Chain())
    assert [p.optimizer.param_groups[0]["fused"] for p in Chain.chained_optimizers] == [True, None]
    (gpu, cpu) = (p.optimizer for p in Chain.chained_optimizers)
    assert gpu_kernels.step_device(cpu, cpu.param_groups[0]["params"][0]) == torch.device("cpu")
    assert gpu_kernels.step_device(gpu, gpu.param_groups[0]["params"][0]) == gpu.param_groups[0]["params"][0].device
