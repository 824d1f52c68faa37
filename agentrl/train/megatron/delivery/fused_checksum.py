"""Checksums of weights in the form in which SGLang holds them, so that both sides of a sync can be compared tensor by tensor.

SGLang joins q, k and v, and gate and up, and pads the vocabulary to a multiple of 64 with zeros. Its checksum of a parameter is on a CPU the
first eight bytes of a SHA-256 over the parameter's bytes ("sha256"), on a GPU a sum of mixed words (word_mix.py, "mix").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl.train.megatron.delivery.checksum import WordMix

_JOINED = {
    **{f"{x}_proj": ("qkv_proj", i) for i, x in enumerate("qkv")},
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS = 64


def checksums(tensors: Iterable[tuple[str, Tensor]], vocab_size: int, kind: str) -> dict[str, str]:
    """Checksum of a kind, by SGLang's name, of each parameter that the tensors (Hugging Face names, any order) make."""
    open_parts: dict[str, dict[int, Tensor]] = {}
    names: list[str] = []
    digests = _KINDS[kind]()
    for name, tensor in tensors:
        *head, last, leaf = name.split(".")
        joined, place = _JOINED.get(last, (last, 0))
        target = ".".join([*head, joined, leaf])
        parts = open_parts.setdefault(target, {})
        parts[place] = tensor
        if len(parts) == _PARTS.get(joined, 1):
            ordered = [parts[i].detach() for i in sorted(parts)]
            if padding := -vocab_size % _ROWS if name in _VOCABULARY else 0:
                ordered.append(tensor.new_zeros(padding, *tensor.shape[1:]))
            names.append(target)
            digests.add(ordered)
            del open_parts[target]
    return dict(zip(names, digests.finish(), strict=True))


class Sha256:
    """The first eight bytes of each tensor's SHA-256."""

    def __init__(self) -> None:
        self._done: list[str] = []

    def add(self, parts: list[Tensor]) -> None:
        """The next tensor, in parts that follow each other."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._done.append(digest.hexdigest()[:16])

    def finish(self) -> list[str]:
        """The checksums."""
        return self._done


_KINDS: dict[str, type[Sha256] | type[WordMix]] = {"sha256": Sha256, "mix": WordMix}
