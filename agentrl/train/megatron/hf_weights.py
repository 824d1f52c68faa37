"""Hugging Face weights <-> megatron-core parameters, by the tables of families/.

Tensors are only divided, joined, stacked and padded, so the two directions are exact inverses. Layers are numbered over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.errors import DataError
from agentrl.train.megatron.families import VALUE_BIAS, VALUE_HEAD, Conversion
from agentrl.train.megatron.megatron_settings import weight_files

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
WHOLE = ("copy", "value_head", "router_bias")
"""Kinds that every tensor-parallel rank has whole."""
EXPERT_DIMENSION = {"expert_rows": 0, "expert_columns": 1}
"""Of one expert's matrix, the dimension that tensor parallelism divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """The tensors of a model, and the sizes that dividing and joining depend on."""

    table: Mapping[str, Conversion]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups over which a rank's tensors are gathered, and which of its tensors this rank helps to gather."""

    tensor: Any
    """ranks that divide tensors"""
    expert: Any
    """ranks that divide experts: for each expert-parallel rank, those that divide each expert"""
    expert_divisions: int
    """ranks that divide each expert"""
    dense_copy: bool
    """this rank belongs to the first copy of the tensors of the dense layers"""
    expert_copy: bool
    """this rank belongs to the first copy of the experts"""

    @property
    def any_copy(self) -> bool:
        """Whether this rank helps to gather something."""
        return self.dense_copy or self.expert_copy


def conversion(name: str, layout: WeightLayout) -> Conversion:
    """The conversion of a megatron parameter, whose layers are numbered over the whole model."""
    if name not in layout.table:
        raise DataError(
            f"the megatron parameter {name!r} has no counterpart among Hugging Face weights; this model cannot be converted"
        )
    return layout.table[name]


def to_megatron(tensors: Sequence[Tensor], kind: str, layout: WeightLayout, rank: int, world: int) -> Tensor:
    """The part of tensor-parallel rank `rank` of `world`, from whole Hugging Face tensors; of experts, those given."""
    if kind in WHOLE:
        return tensors[0]
    if kind == "rows":
        return tensors[0].chunk(world, 0)[rank]
    if kind == "columns":
        return tensors[0].chunk(world, 1)[rank]
    if kind == "glu_joined":
        tensors, kind = tensors[0].chunk(2), "glu"
    if kind == "glu":
        return torch.cat([t.chunk(world, 0)[rank] for t in tensors])
    if kind in EXPERT_DIMENSION:
        return torch.stack([t.chunk(world, EXPERT_DIMENSION[kind])[rank] for t in tensors])
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
    if kind in WHOLE:
        return [shards[0]]
    if kind == "rows":
        return [_join(shards)]
    if kind == "columns":
        return [_join(shards, 1)]
    if kind == "glu_joined":
        return (
            [_join(list(chain(*zip(*(s.chunk(2, 0) for s in shards), strict=True))))]
            if len(shards) > 1
            else [shards[0]]
        )
    if kind == "glu":
        return [_join(halves) for halves in zip(*(s.chunk(2, 0) for s in shards), strict=True)]
    if kind in EXPERT_DIMENSION:
        return [_join(parts, EXPERT_DIMENSION[kind]) for parts in zip(*shards, strict=True)]
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

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        if name not in self._files:
            raise DataError(f"{self.folder} has no tensor {name!r}, which its config.json requires")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class CarriedTensors(Mapping[str, Tensor]):
    """The tensors of a folder whose names start with a prefix, read on demand."""

    def __init__(self, weights: HuggingFaceWeights, prefix: str) -> None:
        self._weights, self._names = weights, [name for name in weights if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def named_tensors(model: Any, *, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """A stage's parameters, with layers numbered over the whole model, and with `buffers` the biases of its routers."""
    biases = ((n, b) for n, b in model.named_buffers() if n.endswith(".expert_bias")) if buffers else ()
    for name, tensor in chain(model.named_parameters(), biases):
        if match := _LAYER.fullmatch(name):
            number = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{match[2]}"
        yield name, tensor


@torch.no_grad()
def load(
    tensors: Iterable[tuple[str, Tensor]], weights: HuggingFaceWeights, layout: WeightLayout, groups: Groups
) -> None:
    """Fill this rank's parts of tensors of this stage, as `named_tensors` yields them."""
    expert_rank = groups.expert.rank()
    for name, parameter in tensors:
        convert = conversion(name, layout)
        if convert.kind == "value_head" and not _has_value_head(weights):
            continue  # it is 0
        names, rank, world = convert.names, groups.tensor.rank(), groups.tensor.size()
        if convert.kind in EXPERT_DIMENSION:
            rank, world = expert_rank % groups.expert_divisions, groups.expert_divisions
            first = expert_rank // world * len(parameter)
            names = names[first : first + len(parameter)]
        value = to_megatron([weights[n] for n in names], convert.kind, layout, rank, world)
        if value.shape != parameter.shape:
            raise DataError(
                f"{weights.folder}: {', '.join(names)} give shape {tuple(value.shape)}, but {name} has {tuple(parameter.shape)}; "
                "do the weights belong to this config.json?"
            )
        parameter.copy_(value)


def _has_value_head(weights: HuggingFaceWeights) -> bool:
    if VALUE_BIAS in weights and weights[VALUE_BIAS].any():
        raise DataError(f"{weights.folder}: {VALUE_BIAS} is not 0, and critics have no bias; set it to 0 or remove it")
    return VALUE_HEAD in weights


@torch.no_grad()
def gather(tensors: Iterable[tuple[str, Tensor]], layout: WeightLayout, groups: Groups) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of this stage, on every rank of the groups.

    `tensors`: by megatron's names, as `named_tensors` yields them. A tied output layer is left out: it is the embedding.
    """
    for name, tensor, shape in gather_views(tensors, layout, groups):
        yield name, tensor.reshape(shape)


@torch.no_grad()
def gather_views(
    tensors: Iterable[tuple[str, Tensor]], layout: WeightLayout, groups: Groups
) -> Iterator[tuple[str, Tensor, list[int]]]:
    """`gather` with (name, tensor, final shape) before the reshape. Without tensor parallelism the tensors are views: nothing is copied.

    Experts are gathered one by one, so that a rank never holds more than one of each of the others.
    """
    for name, part in tensors:
        if name == "output_layer.weight" and layout.tied:
            continue
        convert = conversion(name, layout)
        if convert.kind in EXPERT_DIMENSION:
            if groups.expert_copy:
                yield from _gather_experts(part.detach(), convert, layout, groups)
            continue
        if not groups.dense_copy:
            continue
        own = part.detach().contiguous()
        shards = [own] if convert.kind in WHOLE else _all_gather(own, groups.tensor)
        for target, tensor in zip(convert.names, to_hugging_face(shards, convert.kind, layout), strict=True):
            yield target, tensor, final_shape(tensor, convert.kind)


def _gather_experts(
    own: Tensor, convert: Conversion, layout: WeightLayout, groups: Groups
) -> Iterator[tuple[str, Tensor, list[int]]]:
    divisions = groups.expert_divisions
    for i, expert in enumerate(own):
        parts = _all_gather(expert.contiguous(), groups.expert)
        for rank in range(len(parts) // divisions):
            shards = [part[None] for part in parts[rank * divisions : (rank + 1) * divisions]]
            tensor = to_hugging_face(shards, convert.kind, layout)[0]
            yield convert.names[rank * len(own) + i], tensor, list(tensor.shape)


def _all_gather(own: Tensor, group: Any) -> list[Tensor]:
    if group.size() == 1:
        return [own]
    shards = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(shards, own, group=group)
    return shards
