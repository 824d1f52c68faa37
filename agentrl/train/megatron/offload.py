"""Frees a rank's GPU memory while the engine uses the same GPU (colocated), and restores it.

Storages are resized to 0 and refilled in place, so that every view of them (parameters into megatron's flat buffers) stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from agentrl.train.megatron.model import Built


def _gpu_tensors(built: Built) -> Iterator[tuple[Tensor, bool]]:
    """All large tensors of a rank, and whether their content must be kept (gradients are zeroed before every step)."""
    wrapped = built.wrapped
    for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]:
        yield buffer.grad_data, False
        if buffer.param_data is not None:
            yield buffer.param_data, True
    frozen = (built.reference, built.vision and built.vision.module)
    for model in (wrapped, *(model for model in frozen if model is not None)):
        yield from ((p.data, True) for p in model.parameters() if p.is_cuda)
    for part in getattr(built.optimizer, "chained_optimizers", [built.optimizer]):
        for group in part.optimizer.param_groups:
            yield from ((p.data, True) for p in group["params"] if p.is_cuda)
        for state in part.optimizer.state.values():
            yield from ((t, True) for t in state.values() if isinstance(t, Tensor) and t.is_cuda)


class Offloader:
    """Moves a rank's GPU memory to page-locked host memory, which is kept for the next time."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._offloaded: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        """(emptied storage, its size, its content if it must be kept)"""
        self._host: dict[int, Tensor] = {}
        """host memory by position in `_gpu_tensors`, whose order never changes"""

    def offload(self) -> None:
        """Free the memory; nothing if it is free."""
        if self._offloaded:
            return
        if self._built.vision is not None:
            self._built.vision.forget()
        torch.cuda.synchronize()
        seen: set[int] = set()
        for position, (tensor, keep) in enumerate(_gpu_tensors(self._built)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            self._offloaded.append((storage, storage.nbytes(), self._copy(position, storage) if keep else None))
        torch.cuda.synchronize()
        for storage, _, _ in self._offloaded:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again and restore its content."""
        for storage, size, content in self._offloaded:
            storage.resize_(size)
            if content is not None:
                _bytes(storage).copy_(content, non_blocking=True)
        self._offloaded = []
        torch.cuda.synchronize()

    def _copy(self, position: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._host.get(position)
        if host is None or host.numel() != storage.nbytes():
            host = self._host[position] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return host.copy_(_bytes(storage), non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A flat byte tensor that shares the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
