"""Low-rank adapters on megatron's column- and row-parallel linear layers (lora.py has the formula).

Where tensor parallelism divides the outputs of a layer (q, k, v, gate, up), B is divided as they are and A is whole on each rank; where it divides
the inputs (o, down), A is divided and B is whole. What ranks exchange are the `rank` channels between A and B:

    divided outputs   h = A x; the gradient of h is summed over the ranks. Sequence parallel: h is gathered, its gradient summed and scattered
    divided inputs    h = sum over the ranks of A x. Sequence parallel: summed and scattered

With sequence parallelism a matrix that is whole sees a part of the tokens on each rank, so megatron sums its gradient, as it does for norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import safe_open
from torch import Tensor, nn

from agentrl.core.seeds import derive_seed
from agentrl.train.megatron.families import Conversion
from agentrl.train.megatron.hf_weights import HuggingFaceWeights, WeightLayout, named_tensors
from agentrl.train.megatron.lora import PREFIX, WEIGHTS, Lora, adapted, is_adapter, target_name, tensor_shapes
from agentrl.train.megatron.model_config import ModelConfig


class LowRank(nn.Module):
    """A [rank, in] and B [out, rank] of one matrix: this rank's parts."""

    def __init__(self, rank: int, inputs: int, outputs: int, like: Tensor) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.a = nn.Parameter(torch.empty(rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(outputs, rank, **options))


class Adapter(nn.Module):
    """The adapters of the matrices that one linear layer consists of: submodules by their names in transformers.

    Args:
        linear: megatron's layer.
        convert: the conversion of its weight.
        lora: what is adapted, and how.
        layout: of the model.
    """

    def __init__(self, linear: Any, convert: Conversion, lora: Lora, layout: WeightLayout) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        names = map(target_name, convert.names)
        self._sizes = dict(zip(names, _divided(outputs, convert.kind, layout), strict=True))
        """output channels of each matrix of the layer, adapted or not"""
        self.enabled = True
        self._lora, self._group = lora, linear.tp_group
        self._divides_inputs = convert.kind == "columns"
        self._heads = outputs // (layout.head_dim * (layout.queries_per_group + 2)) if convert.kind == "qkv" else 1
        """key-value heads of this rank, whose parts of q, k and v are neighbours; 1: the parts are one after the other"""
        self._splits = linear.sequence_parallel and linear.tp_group.size() > 1
        """the tokens are divided over the tensor-parallel ranks"""
        for name in adapted(convert, lora.targets):
            part = LowRank(lora.rank, inputs, self._sizes[name], linear.weight)
            whole: Any = part.b if self._divides_inputs else part.a
            whole.sequence_parallel = self._splits
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the layer's output, from its input [s, 1, in]."""
        parts = self._parts()
        inner = self._exchange(torch.cat([F.linear(self._dropped(x), part.a) for part in parts.values()], -1))
        each = zip(parts.items(), inner.split(self._lora.rank, -1), strict=True)
        outputs = {name: F.linear(h * self._lora.scale, part.b) for (name, part), h in each}
        empty = inner[..., :0]
        filled = [
            outputs[n] if n in outputs else empty.new_zeros(*empty.shape[:-1], size) for n, size in self._sizes.items()
        ]
        return torch.cat([t.unflatten(-1, (self._heads, -1)) for t in filled], -1).flatten(-2)

    def delta(self) -> Tensor:
        """What is added to this rank's part of the layer's weight: alpha / rank · B A, fp32, with gradient."""
        deltas = {name: part.b.float() @ part.a.float() * self._lora.scale for name, part in self._parts().items()}
        like = next(iter(deltas.values()))
        filled = [deltas[n] if n in deltas else like.new_zeros(size, like.shape[1]) for n, size in self._sizes.items()]
        return torch.cat([t.unflatten(0, (self._heads, -1)) for t in filled], 1).flatten(0, 1)

    def _parts(self) -> dict[str, LowRank]:
        return {name: part for name, part in self.named_children() if isinstance(part, LowRank)}

    def _dropped(self, x: Tensor) -> Tensor:
        """With dropout in training. The mask is the same on all tensor-parallel ranks where the inputs are."""
        if not (self.training and self._lora.dropout):
            return x
        own = (self._divides_inputs or self._splits) and self._group.size() > 1
        with get_cuda_rng_tracker().fork() if own else nullcontext():
            return F.dropout(x, self._lora.dropout)

    def _exchange(self, inner: Tensor) -> Tensor:
        """The channels between A and B of all ranks, from this rank's."""
        if self._group.size() == 1:
            return inner
        exchange = (
            (reduce_scatter_to_sequence_parallel_region if self._splits else reduce_from_tensor_model_parallel_region)
            if self._divides_inputs
            else (gather_from_sequence_parallel_region if self._splits else copy_to_tensor_model_parallel_region)
        )
        result: Tensor = exchange(inner, group=self._group)
        return result


def _divided(outputs: int, kind: str, layout: WeightLayout) -> Sequence[int]:
    """The output channels of each matrix of a layer, of which this rank has `outputs` in total."""
    if kind == "qkv":
        q = layout.queries_per_group
        return [outputs // (q + 2) * n for n in (q, 1, 1)]
    return [outputs // 2] * 2 if kind == "glu" else [outputs]


def attach(model: Any, lora: Lora, layout: WeightLayout) -> None:
    """Freeze a model and give its layers adapters, with undefined values."""
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for name, linear in list(layer.named_modules()):
            convert = layout.table.get(f"decoder.layers.{layer.layer_number - 1}.{name}.weight")
            if convert is not None and adapted(convert, lora.targets):
                linear.adapter = Adapter(linear, convert, lora, layout)
                linear.register_forward_hook(_add)
    if model.pre_process:  # recomputed layers have gradients only if their input has one
        model.embedding.register_forward_hook(
            lambda _, __, out: out.requires_grad_() if torch.is_grad_enabled() else out
        )


def _add(linear: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    value, bias = output
    return (value + linear.adapter(inputs[0]), bias) if linear.adapter.enabled else output


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Within the `with` block the model computes as its base."""
    adapters = [m for m in model.modules() if isinstance(m, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def weights(model: Any, *, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """`named_tensors` of the model that this one computes: with its adapters merged into the weights, unless they are switched off."""
    adapters = {m.weight: m.adapter for m in model.modules() if isinstance(getattr(m, "adapter", None), Adapter)}
    for name, tensor in named_tensors(model, buffers=buffers):
        if is_adapter(name):
            continue
        adapter = adapters.get(tensor)
        if adapter is not None and adapter.enabled:
            tensor = (tensor.float() + adapter.delta()).to(tensor.dtype)
        yield name, tensor


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """`named_tensors` of the adapters alone."""
    return ((name, tensor) for name, tensor in named_tensors(model, buffers=False) if is_adapter(name))


class AdaptedWeights(HuggingFaceWeights):
    """A model's weights and those of its adapters, by the names in their files. New adapters are drawn, the same in every layout.

    Args:
        base: the model's weights.
        model: its shape.
        lora: its adapters.
        seed: of new adapters.
    """

    def __init__(self, base: HuggingFaceWeights, model: ModelConfig, lora: Lora, seed: int) -> None:
        self.folder, self._files = base.folder, base._files
        self._shapes, self._seed = tensor_shapes(model, lora.rank, lora.targets), seed
        self._start: Any = None if lora.start is None else safe_open(lora.start / WEIGHTS, framework="pt", device="cpu")

    def __getitem__(self, name: str) -> Tensor:
        if not name.startswith(PREFIX):
            return super().__getitem__(name)
        if self._start is not None:
            tensor: Tensor = self._start.get_tensor(name)
            return tensor
        return new_tensor(name, self._shapes[name], self._seed)


def new_tensor(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """A tensor of a new adapter, as peft draws it: A from He et al. 2015 (uniform, a = √5, so within ± 1 / √in), B = 0."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
