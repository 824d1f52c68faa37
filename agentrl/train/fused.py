"""Checksums of weights in the form in which SGLang holds them, so that both sides of a sync can be compared tensor by tensor.

SGLang joins q, k and v, and gate and up, and pads the vocabulary to a multiple of 64 with zeros. Its checksum on a CPU is the first eight
bytes of a SHA-256 over a parameter's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_JOINED = {
    **{f"{x}_proj": ("qkv_proj", i) for i, x in enumerate("qkv")},
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS = 64


def checksums(tensors: Iterable[tuple[str, Tensor]], vocab_size: int) -> dict[str, str]:
    """Checksum by SGLang's name of each parameter that the tensors (Hugging Face names, any order) make."""
    open_parts: dict[str, dict[int, Tensor]] = {}
    done: dict[str, str] = {}
    for name, tensor in tensors:
        *head, last, kind = name.split(".")
        joined, place = _JOINED.get(last, (last, 0))
        target = ".".join([*head, joined, kind])
        parts = open_parts.setdefault(target, {})
        parts[place] = tensor
        if len(parts) == _PARTS.get(joined, 1):
            ordered = [parts[i] for i in sorted(parts)]
            padding = -vocab_size % _ROWS if name in _VOCABULARY else 0
            done[target] = _digest(ordered, padding)
            del open_parts[target]
    return done


def _digest(parts: list[Tensor], padding_rows: int) -> str:
    digest: Any = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if padding_rows:
        digest.update(bytes(padding_rows * parts[0][0].nbytes))
    return str(digest.hexdigest()[:16])
