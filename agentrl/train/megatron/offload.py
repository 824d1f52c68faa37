"""Gives a rank's GPU memory back while the engine works on the same card (colocated), and takes it again.

Storages are emptied in place and refilled, so every view of them (parameters into megatron's flat buffers) stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from agentrl.train.megatron.model import Built


def _tensors(built: Built) -> Iterator[tuple[Tensor, bool]]:
    """All large tensors of a rank, and whether their content matters (gradients are zeroed before every step)."""
    wrapped = built.wrapped
    for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]:
        yield buffer.grad_data, False
        if buffer.param_data is not None:
            yield buffer.param_data, True
    models = [wrapped] if built.reference is None else [wrapped, built.reference]
    for model in models:
        yield from ((p.data, True) for p in model.parameters() if p.is_cuda)
    for part in getattr(built.optimizer, "chained_optimizers", [built.optimizer]):
        for group in part.optimizer.param_groups:
            yield from ((p.data, True) for p in group["params"] if p.is_cuda)
        for state in part.optimizer.state.values():
            yield from ((t, True) for t in state.values() if isinstance(t, Tensor) and t.is_cuda)


class Parking:
    """Where a rank's GPU memory goes while the engine has the card. The host's side is page-locked and kept for the next time."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._gone: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        """storages that are empty now, their sizes, and their content where it matters"""
        self._host: dict[int, Tensor] = {}
        """by place in the order of `_tensors`, which is always the same"""

    def park(self) -> None:
        """Give the memory back."""
        if self._gone:
            return
        torch.cuda.synchronize()
        seen: set[int] = set()
        for place, (tensor, matters) in enumerate(_tensors(self._built)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            self._gone.append((storage, storage.nbytes(), self._copy(place, storage) if matters else None))
        torch.cuda.synchronize()
        for storage, _, _ in self._gone:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Put everything back."""
        for storage, size, content in self._gone:
            storage.resize_(size)
            if content is not None:
                _bytes(storage).copy_(content, non_blocking=True)
        self._gone = []
        torch.cuda.synchronize()

    def _copy(self, place: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._host.get(place)
        if host is None or host.numel() != storage.nbytes():
            host = self._host[place] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return host.copy_(_bytes(storage), non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
