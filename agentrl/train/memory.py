"""Gives a rank's GPU memory back while the engine works on the same card (colocated), and takes it again.

Storages are emptied in place and refilled, so every view of them (parameters into megatron's flat buffers) stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from agentrl.train.model import Built


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


class Parked:
    """The content of a rank's GPU memory, on the CPU."""

    def __init__(self, built: Built) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage | None, int]] = {}
        torch.cuda.synchronize()
        for tensor, matters in _tensors(built):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._kept or not storage.nbytes():
                continue
            self._kept[storage.data_ptr()] = (storage, storage.cpu() if matters else None, storage.nbytes())
        for storage, _, _ in self._kept.values():
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Put everything back."""
        for storage, content, size in self._kept.values():
            storage.resize_(size)
            if content is not None:
                storage.copy_(content)
        self._kept = {}
        torch.cuda.synchronize()
