"""Hugging Face weights <-> megatron-core parameters of dense Llama, Qwen2 (q, k, v biases) and Qwen3 (q and k norms) models.

A table defines for each megatron parameter the Hugging Face tensors it consists of, and how tensor parallelism divides it:

    copy       one tensor, equal on all tensor-parallel ranks
    columns    one tensor, divided along dimension 1
    glu        gate and up, each divided along dimension 0, joined on each rank
    vocab      one tensor, padded with zeros to a multiple of the ranks, divided along dimension 0
    qkv        q, k and v, joined per key-value head (its query heads, then k, then v), divided by key-value heads

Tensors are only divided, joined and padded, so the two directions are exact inverses. Layers are numbered over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.errors import DataError
from agentrl.train.megatron.megatron_settings import weight_files

EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION, _MLP = "self_attn.", "mlp."
VALUE_HEAD, VALUE_BIAS = "score.weight", "score.bias"
"""the value head of a critic, as transformers' ForTokenClassification names it"""
_TOP = {
    "embedding.word_embeddings.weight": ("vocab", EMBEDDING),
    "output_layer.weight": ("vocab", "lm_head.weight"),
    "decoder.final_layernorm.weight": ("copy", "model.norm.weight"),
}
_IN_LAYER = {
    "self_attention.linear_qkv.weight": ("qkv", *(_ATTENTION + f"{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", *(_ATTENTION + f"{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": ("columns", _ATTENTION + "o_proj.weight"),
    "self_attention.q_layernorm.weight": ("copy", _ATTENTION + "q_norm.weight"),
    "self_attention.k_layernorm.weight": ("copy", _ATTENTION + "k_norm.weight"),
    "mlp.linear_fc1.weight": ("glu", _MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "mlp.linear_fc2.weight": ("columns", _MLP + "down_proj.weight"),
    "input_layernorm.weight": ("copy", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("copy", "post_attention_layernorm.weight"),
    # Transformer Engine fuses each norm into the linear layer that follows it
    "self_attention.linear_qkv.layer_norm_weight": ("copy", "input_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": ("copy", "post_attention_layernorm.weight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """The sizes of a model that dividing and joining depend on."""

    groups: int
    """key-value heads"""
    queries_per_group: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    """the output layer and the embedding share one weight"""
    critic: bool = False
    """the output layer is a value head"""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one megatron parameter is made of Hugging Face tensors."""

    kind: str
    """copy, vocab, columns, glu, qkv, value_head"""
    names: tuple[str, ...]
    """Hugging Face names of the tensors"""


def conversion(name: str, layout: WeightLayout) -> Conversion:
    """The conversion of a megatron parameter, whose layers are numbered over the whole model."""
    if name == "output_layer.weight" and layout.tied:
        return Conversion("vocab", (EMBEDDING,))
    if name == "output_layer.weight" and layout.critic:
        return Conversion("value_head", (VALUE_HEAD,))
    match = _LAYER.fullmatch(name)
    kind, *names = (_IN_LAYER.get(match[2]) if match else _TOP.get(name)) or (None,)
    if kind is None:
        raise DataError(
            f"the megatron parameter {name!r} has no counterpart among Hugging Face weights; this model cannot be converted"
        )
    prefix = f"model.layers.{match[1]}." if match else ""
    return Conversion(kind, tuple(prefix + n for n in names))


def to_megatron(tensors: Sequence[Tensor], kind: str, layout: WeightLayout, rank: int, world: int) -> Tensor:
    """The part of tensor-parallel rank `rank` of `world`, from whole Hugging Face tensors."""
    if kind in ("copy", "value_head"):
        return tensors[0]
    if kind == "columns":
        return tensors[0].chunk(world, 1)[rank]
    if kind == "glu":
        return torch.cat([t.chunk(world, 0)[rank] for t in tensors])
    if kind == "vocab":
        whole = tensors[0]
        if missing := layout.padded_vocab_size - whole.shape[0]:
            whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
        return whole.chunk(world, 0)[rank]
    grouped = [t.view(layout.groups, -1, *t.shape[1:]) for t in tensors]
    return torch.cat(grouped, 1).chunk(world, 0)[rank].flatten(0, 1)


def to_hugging_face(shards: Sequence[Tensor], kind: str, layout: WeightLayout) -> list[Tensor]:
    """The inverse of `to_megatron`, from the parts of all tensor-parallel ranks in order.

    The tensors of a single part are views. Those of a q, k, v parameter keep the key-value heads as a separate first dimension;
    `final_shape` is their shape in a Hugging Face folder.
    """
    if kind in ("copy", "value_head"):
        return [shards[0]]
    if kind == "columns":
        return [_join(shards, 1)]
    if kind == "glu":
        return [_join(halves) for halves in zip(*(s.chunk(2, 0) for s in shards), strict=True)]
    whole = _join(shards)
    if kind == "vocab":
        return [whole[: layout.vocab_size]]
    d, q = layout.head_dim, layout.queries_per_group
    return list(whole.view(layout.groups, (q + 2) * d, *whole.shape[1:]).split([q * d, d, d], 1))


def final_shape(tensor: Tensor, kind: str) -> list[int]:
    """The shape in a Hugging Face folder of a tensor of `to_hugging_face`."""
    first, *rest = tensor.shape
    return [first * rest[0], *rest[1:]] if kind == "qkv" else [first, *rest]


def _join(shards: Sequence[Tensor], dimension: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dimension)


class HuggingFaceWeights:
    """The tensors of a Hugging Face folder by name, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files: list[Any] = [safe_open(f, framework="pt", device="cpu") for f in weight_files(folder)]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118, it is not iterable

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        if name not in self._files:
            raise DataError(f"{self.folder} has no tensor {name!r}, which its config.json requires")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A stage's parameters, with layers numbered over the whole model."""
    for name, parameter in model.named_parameters():
        if match := _LAYER.fullmatch(name):
            number = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{match[2]}"
        yield name, parameter


@torch.no_grad()
def load(model: Any, weights: HuggingFaceWeights, layout: WeightLayout, rank: int, world: int) -> None:
    """Fill this stage's parameters of tensor-parallel rank `rank` of `world`."""
    for name, parameter in named_parameters(model):
        convert = conversion(name, layout)
        if convert.kind == "value_head" and not _has_value_head(weights):
            continue  # it is 0
        value = to_megatron([weights[n] for n in convert.names], convert.kind, layout, rank, world)
        if value.shape != parameter.shape:
            names = ", ".join(convert.names)
            raise DataError(
                f"{weights.folder}: {names} give shape {tuple(value.shape)}, but {name} has {tuple(parameter.shape)}; "
                "do the weights belong to this config.json?"
            )
        parameter.copy_(value)


def _has_value_head(weights: HuggingFaceWeights) -> bool:
    if VALUE_BIAS in weights and weights[VALUE_BIAS].any():
        raise DataError(f"{weights.folder}: {VALUE_BIAS} is not 0, and critics have no bias; set it to 0 or remove it")
    return VALUE_HEAD in weights


@torch.no_grad()
def gather(
    model: Any, layout: WeightLayout, group: Any, value: Callable[[torch.nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of this stage, on every rank of the tensor-parallel group.

    `value` selects the parameter itself or its gradient. A tied output layer is left out: it is the embedding.
    """
    for name, tensor, shape in gather_views(model, layout, group, value):
        yield name, tensor.reshape(shape)


@torch.no_grad()
def gather_views(
    model: Any, layout: WeightLayout, group: Any, value: Callable[[torch.nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor, list[int]]]:
    """`gather` with (name, tensor, final shape) before the reshape. Without tensor parallelism the tensors are views: nothing is copied."""
    for name, parameter in named_parameters(model):
        if name == "output_layer.weight" and layout.tied:
            continue
        convert = conversion(name, layout)
        own = value(parameter).detach().contiguous()
        shards = [own]
        if group.size() > 1 and convert.kind not in ("copy", "value_head"):
            shards = [torch.empty_like(own) for _ in range(group.size())]
            torch.distributed.all_gather(shards, own, group=group)
        for target, tensor in zip(convert.names, to_hugging_face(shards, convert.kind, layout), strict=True):
            yield target, tensor, final_shape(tensor, convert.kind)
