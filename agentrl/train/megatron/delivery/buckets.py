"""Weights on their way out of a trainer rank: named tensors packed into flat byte buckets, and the form in which SGLang takes a bucket.

SGLang reads a pickle (base64) of {"flattened_tensor": bytes, "metadata": [an object per tensor]} in which the flat tensor is a handle of
shared memory or CUDA memory, as torch.multiprocessing pickles it. It wants attributes of the metadata, not a class, so a plain
namespace does and SGLang need not be importable here. One dtype per bucket is not needed, but offsets must suit the dtype.
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


@dataclass
class Bucket:
    """Tensors, one after the other, in one flat tensor of bytes."""

    flat: Tensor
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    used: int = 0
    _sources: list[Tensor] = field(default_factory=list)
    _targets: list[Tensor] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, shape: list[int]) -> None:
        """Append a tensor, which `shape` has flattened or not; there must be room. It is copied by `fill`."""
        end = self.used + tensor.nbytes
        self._sources.append(tensor)
        self._targets.append(self.flat[self.used : end].view(tensor.dtype).view(tensor.shape))
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(shape)
        self.used = end

    def fill(self) -> Bucket:
        """Copy what was added, all at once."""
        torch._foreach_copy_(self._targets, self._sources)
        self._sources, self._targets = [], []
        return self

    def fits(self, tensor: Tensor) -> bool:
        """There is room, and the offset suits the dtype."""
        return self.used + tensor.nbytes <= self.flat.numel() and self.used % tensor.element_size() == 0

    @property
    def content(self) -> Tensor:
        """What is used of the flat tensor."""
        return self.flat[: self.used]


FIRST = 8
"""the first bucket is so many times smaller: the receiver has something to do while the second is packed"""


@torch.no_grad()
def buckets(tensors: Iterable[tuple[str, Tensor, list[int]]], size: int, *, shared: bool) -> Iterator[Bucket]:
    """Pack (name, tensor, final shape) into buckets of `size` bytes; a tensor that is larger has one of its own.

    Every bucket has memory of its own: the receiver may still read one when its answer is here, and the allocator knows that. `shared`:
    CPU memory that another process can map.
    """
    current: Bucket | None = None
    room = size // FIRST
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
    """A bucket as SGLang takes it; the bucket must live until the receiver has answered. One string serves one receiver."""
    metadata, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        end = start + torch.Size(shape).numel() * kind.itemsize
        metadata.append(
            SimpleNamespace(name=name, shape=tuple(shape), dtype=kind, start_idx=start, end_idx=end, numel=end - start)
        )
        start = end
    out = io.BytesIO()
    ForkingPickler(out).dump({"flattened_tensor": bucket.content, "metadata": metadata})
    return base64.b64encode(out.getvalue()).decode()
