"""Buckets: named tensors packed into flat byte tensors, and the form in which SGLang reads a bucket.

SGLang reads a base64 pickle of {"flattened_tensor": bytes, "metadata": [an object per tensor]}, in which the flat tensor is a handle of
shared or CUDA memory, as torch.multiprocessing pickles it. It needs the attributes of the metadata, not a class: a namespace does, and SGLang
need not be importable here. A bucket may mix dtypes if their offsets are aligned.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing  # registers how tensors are pickled
from torch import Tensor

FIRST_FRACTION = 8
"""The first bucket has this fraction of the size, so that the receiver can start while the second is packed."""


@dataclass
class Bucket:
    """Tensors one after the other in one flat byte tensor."""

    flat: Tensor
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    used: int = 0
    """bytes in use"""
    _sources: list[Tensor] = field(default_factory=list)
    _targets: list[Tensor] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, shape: list[int]) -> None:
        """Append a tensor that fits; `fill` copies it. `shape` is its final shape."""
        end = self.used + tensor.nbytes
        self._sources.append(tensor)
        self._targets.append(self.flat[self.used : end].view(tensor.dtype).view(tensor.shape))
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(shape)
        self.used = end

    def fill(self) -> Bucket:
        """Copy all appended tensors at once."""
        torch._foreach_copy_(self._targets, self._sources)
        self._sources, self._targets = [], []
        return self

    def fits(self, tensor: Tensor) -> bool:
        """Whether there is room, at an offset that is aligned for the dtype."""
        return self.used + tensor.nbytes <= self.flat.numel() and self.used % tensor.element_size() == 0

    @property
    def content(self) -> Tensor:
        """The bytes in use."""
        return self.flat[: self.used]


@torch.no_grad()
def buckets(tensors: Iterable[tuple[str, Tensor, list[int]]], size: int, *, shared: bool) -> Iterator[Bucket]:
    """Pack (name, tensor, final shape) into buckets of `size` bytes; a larger tensor has a bucket to itself.

    Every bucket has separate memory, since the receiver may still read one after it has answered. `shared`: CPU memory that another process
    can map.
    """
    current: Bucket | None = None
    room = size // FIRST_FRACTION
    for name, tensor, shape in tensors:
        if current is not None and not current.fits(tensor):
            yield current.fill()
            current, room = None, size
        if current is None:
            flat = torch.empty(max(room, tensor.nbytes), dtype=torch.uint8, device=tensor.device)
            current = Bucket(flat.share_memory_() if shared and not flat.is_cuda else flat)
        current.add(name, tensor, shape)
    if current is not None:
        yield current.fill()


def serialise(bucket: Bucket) -> str:
    """A bucket as SGLang reads it, for one receiver. The bucket must live until the receiver has answered."""
    metadata, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        metadata.append(
            SimpleNamespace(
                name=name, shape=tuple(shape), dtype=kind, start_idx=start, end_idx=start + size, numel=size
            )
        )
        start += size
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump({"flattened_tensor": bucket.content, "metadata": metadata})
    return base64.b64encode(pickled.getvalue()).decode()
