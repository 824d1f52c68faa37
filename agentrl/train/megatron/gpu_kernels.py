"""Faster replacements of what megatron-core falls back to on a GPU without Transformer Engine and Apex.

megatron's fallbacks for the gradient norm read each parameter's norm to the host one by one, scale gradients through a copy, rotate queries
and keys in six kernels, add weight gradients in bf16 to those in fp32 by another kernel, and step torch's AdamW without its fused kernel.
`install()` runs after megatron is imported and before a model is built; it changes nothing on a CPU, or where megatron found the kernels of the
two packages. Norms, heads, SwiGLU and merged attention in half precision are computed by triton_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Replace megatron's fallbacks on a GPU; idempotent."""
    if not torch.cuda.is_available():
        return
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
        clip_grads.multi_tensor_scale_impl = scale_all
    rope_utils._apply_rotary_pos_emb_bshd = rotate
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
        )
        layers._grad_accum_fusion_available = True
    if (kernels := triton_kernels()) is not None:
        mlp.bias_swiglu_impl = partial(_swiglu, kernels, mlp.bias_swiglu_impl)


@cache
def triton_kernels() -> ModuleType | None:
    """The module of Triton kernels; None without a GPU or Triton."""
    if not (torch.cuda.is_available() and find_spec("triton")):
        return None
    from agentrl.train.megatron import triton_kernels

    return triton_kernels


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the CPU. To a GPU from pinned memory, so that the host does not wait for what the GPU still computes."""
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang & Sennrich 2019) over the last dimension."""
    kernels = triton_kernels() if _in_half(x) else None
    if kernels is None:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    y: Tensor = kernels.rms_norm(x, weight, eps)
    return y


def merge_attention(out: Tensor, lse: Tensor, place: slice | Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge the attention of some queries to other keys into `out` and `lse`, by the log-sum-exps (formula: tree_attention.py).

    Args:
        out: [n, heads, d], in the precision of `other_out` or higher.
        lse: [heads, n].
        place: which queries the others are, each at most once.
        other_out: [m, heads, d].
        other_lse: [heads, m].
    """
    kernels = triton_kernels() if _in_half(other_out) else None
    if kernels is not None:
        kernels.merge_attention(out, lse, place, other_out, other_lse)
        return
    before = lse[:, place]
    total = torch.logaddexp(before, other_lse)
    weight, other_weight = ((x - total).exp().mT[..., None] for x in (before, other_lse))
    out[place] = torch.addcmul(out[place] * weight, other_out.to(weight.dtype), other_weight).to(out.dtype)
    lse[:, place] = total


def _swiglu(kernels: ModuleType, fallback: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    if bias is not None or any(rest) or not _in_half(x):
        return fallback(x, bias, *rest)
    y: Tensor = kernels.swiglu(x)
    return y


def _in_half(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def add_weight_gradient(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of a linear layer's weight to `total` in the matrix product itself; the arguments are those of Apex's wgrad_gemm_accum.

    Args:
        inputs: [tokens, in].
        grad: [tokens, out], the gradient of the outputs.
        total: [out, in], fp32 or the inputs' dtype.
    """
    if total.dtype == inputs.dtype:
        total.addmm_(grad.t(), inputs)
    else:
        torch.addmm(total, grad.t(), inputs, out_dtype=total.dtype, out=total)


def norm_of_all(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _per_tensor: bool) -> tuple[Tensor, None]:
    """The L2 norm [1] of all tensors together; the arguments are those of Apex's multi_tensor_l2norm."""
    norms = torch._foreach_norm([t for group in tensors for t in group])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale_all(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Multiply all tensors in place; the arguments are those of Apex's multi_tensor_scale, sources and targets being the same."""
    sources, targets = tensors
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def use_fused_adam(optimizer: Any) -> None:
    """Let torch's AdamW update all parameters of a GPU in one kernel, and those of a CPU as it does by default.

    The step counts of the fused kernel are on the GPU. A checkpoint of the other device brings its choice along, so this is called after loading too.

    Args:
        optimizer: megatron's.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = getattr(part, "optimizer", None)
        if isinstance(adam, torch.optim.Adam):
            for group in adam.param_groups:
                on_gpu = all(p.is_cuda for p in group["params"])
                group["fused"], group["foreach"] = (True, False) if on_gpu else (None, None)


def step_device(adam: torch.optim.Adam, parameter: Tensor) -> torch.device:
    """Where the step count of a parameter must be: with the parameter for the fused kernel, else on the CPU."""
    for group in adam.param_groups:
        if any(p is parameter for p in group["params"]):
            return parameter.device if group.get("fused") else torch.device("cpu")
    return torch.device("cpu")


def rotate(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of queries or keys; replaces megatron's function of the same arguments.

    Args:
        t: [s, b, heads, d].
        freqs: [s, 1, 1, r], angles of the first r ≤ d channels.
        rotary_interleaved: the channels of a pair are neighbours; otherwise they are in the two halves of the r channels.
        multi_latent_attention: refused.
        mscale: factor of cosine and sine.
    """
    if multi_latent_attention:
        raise NotImplementedError(
            "megatron's latent attention is not supported; latent_attention.py orders the channels before it calls this"
        )
    cos, sin = ((f * mscale).to(t.dtype) for f in (freqs.cos(), freqs.sin()))
    return _rotation(rotary_interleaved)(t, cos, sin)


def _rotate_halves(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    part, rest = t[..., :width], t[..., width:]
    first, second = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def _rotate_neighbours(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    part, rest = t[..., :width], t[..., width:]
    turned = torch.stack([-part[..., 1::2], part[..., 0::2]], -1).flatten(-2)
    return torch.cat([part * cos + turned * sin, rest], -1)


@cache
def _rotation(interleaved: bool) -> Callable[..., Tensor]:
    """The rotation as one kernel where Triton is there."""
    rotation = _rotate_neighbours if interleaved else _rotate_halves
    if triton_kernels() is None:
        return rotation
    compiled: Callable[..., Tensor] = torch.compile(rotation, dynamic=True)
    return compiled
