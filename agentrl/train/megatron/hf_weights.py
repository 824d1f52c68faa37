"""Hugging Face weights <-> megatron-core parameters, for Llama, Qwen2 (q, k, v biases) and Qwen3 (q and k norms), dense.

One table says, for each megatron parameter, which Hugging Face tensors it is made of and how tensor parallelism cuts it. The two directions
are exact inverses; nothing is computed, only cut, joined and padded. Layers are numbered over the whole model, whatever the pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import DataError
from agentrl.train.megatron.megatron_settings import weight_files

EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION, _MLP = "self_attn.", "mlp."
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
    # Transformer Engine fuses the norms into the linears that follow them
    "self_attention.linear_qkv.layer_norm_weight": ("copy", "input_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": ("copy", "post_attention_layernorm.weight"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What cutting and joining need to know of the model."""

    groups: int
    """key-value heads"""
    queries_per_group: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    """the output layer is the embedding"""


@dataclass(frozen=True, slots=True)
class Source:
    """How one megatron parameter comes from Hugging Face tensors."""

    kind: str
    """copy, vocab, columns, glu, qkv"""
    names: tuple[str, ...]


def source(name: str, layout: Layout) -> Source:
    """Look a megatron parameter name (layers numbered over the whole model) up."""
    if name == "output_layer.weight" and layout.tied:
        return Source("vocab", (EMBEDDING,))
    match = _LAYER.fullmatch(name)
    kind, *names = (_IN_LAYER.get(match[2]) if match else _TOP.get(name)) or (None,)
    if kind is None:
        raise DataError(
            f"the megatron parameter {name!r} has no counterpart among Hugging Face weights; this model cannot be converted"
        )
    prefix = f"model.layers.{match[1]}." if match else ""
    return Source(kind, tuple(prefix + n for n in names))


def to_megatron(tensors: Sequence[Tensor], kind: str, layout: Layout, rank: int, world: int) -> Tensor:
    """Join whole Hugging Face tensors and cut out what tensor-parallel rank `rank` of `world` holds."""
    if kind == "copy":
        return tensors[0]
    if kind == "columns":
        return tensors[0].chunk(world, 1)[rank]
    if kind == "glu":
        return torch.cat([t.chunk(world, 0)[rank] for t in tensors])
    if kind == "vocab":
        full = tensors[0]
        missing = layout.padded_vocab_size - full.shape[0]
        return (
            torch.cat([full, full.new_zeros(missing, *full.shape[1:])]).chunk(world, 0)[rank]
            if missing
            else full.chunk(world, 0)[rank]
        )
    grouped = [t.view(layout.groups, -1, *t.shape[1:]) for t in tensors]
    return torch.cat(grouped, 1).chunk(world, 0)[rank].flatten(0, 1)


def to_hugging_face(shards: Sequence[Tensor], kind: str, layout: Layout) -> list[Tensor]:
    """The inverse of `to_megatron`, from the shards of all tensor-parallel ranks in order.

    Of a single shard they are views. What is cut out of a joined q, k, v keeps the key-value heads as a dimension of its own, in
    front; `final_shape` is the shape that a tensor has in a Hugging Face folder.
    """
    if kind == "copy":
        return [shards[0]]
    if kind == "columns":
        return [_join(shards, 1)]
    if kind == "glu":
        return [_join(halves) for halves in zip(*(s.chunk(2, 0) for s in shards), strict=True)]
    full = _join(shards)
    if kind == "vocab":
        return [full[: layout.vocab_size]]
    d, q = layout.head_dim, layout.queries_per_group
    return list(full.view(layout.groups, (q + 2) * d, *full.shape[1:]).split([q * d, d, d], 1))


def final_shape(tensor: Tensor, kind: str) -> list[int]:
    """Of a tensor of `to_hugging_face`."""
    first, *rest = tensor.shape
    return [first * rest[0], *rest[1:]] if kind == "qkv" else [first, *rest]


def _join(shards: Sequence[Tensor], dimension: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dimension)


class HuggingFaceWeights:
    """The tensors of a Hugging Face folder by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._open: Callable[[Path], Any] = lambda p: safe_open(p, framework="pt", device="cpu")
        self.folder = folder
        self._where = {name: f.name for f in weight_files(folder) for name in self._open(f).keys()}  # noqa: SIM118
        self._files: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        if name not in self._where:
            raise DataError(f"{self.folder} has no tensor {name!r}, which its config.json calls for")
        file = self._where[name]
        if file not in self._files:
            self._files[file] = self._open(self.folder / file)
        return self._files[file].get_tensor(name)


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A stage's parameters with layers numbered over the whole model."""
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        if match:
            number = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{match[2]}"
        yield name, parameter


@torch.no_grad()
def load(model: Any, weights: HuggingFaceWeights, layout: Layout, rank: int, world: int) -> None:
    """Fill this stage's parameters (shard `rank` of `world`) from Hugging Face weights."""
    for name, parameter in named_parameters(model):
        where = source(name, layout)
        value = to_megatron([weights[n] for n in where.names], where.kind, layout, rank, world)
        if value.shape != parameter.shape:
            raise DataError(
                f"{name} has shape {tuple(parameter.shape)}, {', '.join(where.names)} give {tuple(value.shape)}"
            )
        parameter.copy_(value)


@torch.no_grad()
def gather(
    model: Any, layout: Layout, group: Any, value: Callable[[torch.nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of this stage, on every rank of the tensor-parallel group.

    `value` says what to take of a parameter: itself, or its gradient. A tied output layer is left out where the embedding is written.
    """
    for name, tensor, shape in gather_views(model, layout, group, value):
        yield name, tensor.reshape(shape)


@torch.no_grad()
def gather_views(
    model: Any, layout: Layout, group: Any, value: Callable[[torch.nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor, list[int]]]:
    """`gather` before tensors take their final shape, which comes with them: without tensor parallelism nothing is copied."""
    for name, parameter in named_parameters(model):
        if name == "output_layer.weight" and layout.tied:
            continue
        where = source(name, layout)
        mine = value(parameter).detach().contiguous()
        shards = [mine]
        if group.size() > 1 and where.kind != "copy":
            shards = [torch.empty_like(mine) for _ in range(group.size())]
            torch.distributed.all_gather(shards, mine, group=group)
        for target, tensor in zip(where.names, to_hugging_face(shards, where.kind, layout), strict=True):
            yield target, tensor, final_shape(tensor, where.kind)
