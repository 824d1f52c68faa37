"""Lets megatron-core run without CUDA: its hard-coded `cuda` devices, streams and generators become the CPU's.

`install()` must run before megatron is imported; where CUDA is available it does nothing. It changes torch for the whole process, so only
trainer ranks call it. tests/train/test_megatron.py compares the results with transformers. Interleaved pipelines compute wrong numbers over
gloo; megatron_settings.py refuses them.
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


class _NoStream:
    """Replaces CUDA streams and events; every wait returns at once. A class, because libraries annotate `torch.cuda.Stream | None`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _NoStream()

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def install() -> None:
    """Replace the CUDA parts of torch that megatron-core uses; idempotent."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    module: Any = torch
    for name in _FACTORIES:
        setattr(module, name, _on_cpu(getattr(torch, name)))
    module.compile = lambda model=None, **_: (
        (lambda f: f) if model is None else model
    )  # megatron decorates small functions with it
    module.Tensor.cuda = module.nn.Module.cuda = lambda self, *_, **__: self
    _replace_cuda_module()
    _replace_type_names()
    _replace_barrier()
    _replace_all_to_all()
    _replace_rng()


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory for which device 'cuda' means the CPU."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _replace_cuda_module() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.stream = lambda _: contextlib.nullcontext()


def _replace_type_names() -> None:
    """megatron recognises fp32 parameters by `param.type() == 'torch.cuda.FloatTensor'`."""
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


def _replace_all_to_all() -> None:
    """megatron makes lists of sizes only when it copies them from a GPU."""
    module: Any = torch.distributed
    original = module.all_to_all_single

    def all_to_all_single(
        output: Any, source: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
    ) -> Any:
        sizes = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (output_split_sizes, input_split_sizes))
        return original(output, source, *sizes, **options)

    module.all_to_all_single = all_to_all_single


def _replace_rng() -> None:
    """The GPU's generator becomes the CPU's."""
    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    from megatron.core.tensor_parallel import random as megatron_random

    module: Any = megatron_random
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
