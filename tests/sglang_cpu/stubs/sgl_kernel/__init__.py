"""Replaces SGLang's compiled kernels on a CPU for which they are not built. SGLang imports names at its top level that only
speculative decoding calls; everything else has a fallback in PyTorch. So every name exists here, and fails when it is called.
"""

from typing import Any

import torch

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this CPU")

    return missing


class _NoCuda:
    """The buffer of routed experts is registered as pinned memory, also where there is no GPU to copy from it."""

    @staticmethod
    def cudaHostRegister(*_: Any) -> int:
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = _NoCuda
