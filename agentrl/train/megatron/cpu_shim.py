"""Lets megatron-core run where there is no CUDA: its hard-wired `cuda` devices, streams and generators become the CPU's.

`install()` must run before megatron is imported, and does nothing where CUDA is available. It changes torch for the whole process, so
only a trainer rank calls it. Measured against transformers: tests/train. Interleaved pipelines give wrong numbers over gloo and are
refused in `model.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
)
_installed = False


class _Nothing:
    """Stands for a CUDA stream or event: every wait is over at once. A class, since libraries annotate with `torch.cuda.Stream | None`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def query(self) -> bool:
        """Nothing is pending."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Milliseconds between two events: none."""
        return 0.0


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that takes a literal device='cuda' for the CPU."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def install() -> None:
    """Replace the CUDA parts of torch that megatron-core uses; idempotent, and nothing at all where CUDA is there."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    module: Any = torch
    module.compile = lambda model=None, **_: (
        (lambda f: f) if model is None else model
    )  # megatron decorates small functions with it
    module.Tensor.cuda = module.nn.Module.cuda = lambda self, *_, **__: self
    _replace_cuda_module()
    _replace_type_names()
    _replace_barrier()
    _replace_rng()


def _replace_cuda_module() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = lambda _: contextlib.nullcontext()


def _replace_type_names() -> None:
    """megatron tells fp32 parameters by `param.type() == 'torch.cuda.FloatTensor'`."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    tensor: Any = torch.Tensor
    tensor.type = type_name


def _replace_barrier() -> None:
    """gloo refuses `device_ids`."""
    module: Any = torch.distributed
    original = module.barrier
    module.barrier = lambda group=None, async_op=False, device_ids=None: original(group=group, async_op=async_op)


def _replace_rng() -> None:
    """The generator of 'the GPU' is the CPU's."""
    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    from megatron.core.tensor_parallel import random as megatron_random

    module: Any = megatron_random
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
