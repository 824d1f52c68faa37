"""Checksums of the weights as SGLang reports them (/weights_checker), so that both sides of a sync are compared parameter by parameter.

SGLang joins q, k and v, gate and up, and the experts of a layer, and pads the vocabulary with zeros to a multiple of 64. Of a parameter's
bytes it computes on a CPU
("sha256") the first eight bytes of the SHA-256, and on a GPU ("mix", 0.5.17 to 0.5.23) this:

    bytes -> 32-bit words w_i in tiles of 8192
    half of a tile = mix(sum of mix(w_i xor place(i)) xor number of bytes), modulo 2^32, for each of two functions `place`
    checksum = finish(sum of the tiles, two halves each, modulo 2^64)

`mix` is the finaliser of 32-bit MurmurHash3, `finish` that of SplitMix64 (Steele, Lea, Flood 2014, fig. 13) without its first addition.

Log-probs of the probe sequence cannot replace the checksums: they show a tensor that was lost (tests/weight_sync/test_verify_joint.py), but a
small change of a tensor can stay below the limit of their difference.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 8192
CHUNK = 1024 * TILE
"""Words processed together: 32 MiB, so that intermediate results stay in a GPU's cache."""
_SEED = 0x243F6A88
_PLACES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, 13))
"""Factor, addend and rotation of each `place` function."""
_MASK64 = (1 << 64) - 1
_JOINED = {
    **{f"{x}_proj": ("qkv_proj", i) for i, x in enumerate("qkv")},
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
COMPARABLE = ("llama", "qwen2", "qwen3")
"""Families whose parameters are known to be as above in SGLang. Of others it may rearrange some; only log-probs verify them."""
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64


@torch.no_grad()
def server_checksums(
    tensors: Iterable[tuple[str, Tensor]], vocab_size: int, kind: str, experts: int = 0
) -> dict[str, str]:
    """The checksum of each server parameter, by the server's name. `tensors`: Hugging Face (name, tensor) in any order; `experts`: of a layer.

    The parts of a parameter are kept until it is complete, those of a mixture of experts thus until all experts of a layer are there.
    """
    incomplete: dict[str, dict[int, Tensor]] = {}
    sums: dict[str, str | Tensor] = {}
    for name, tensor in tensors:
        target, place, count = _server_parameter(name, experts)
        parts = incomplete.setdefault(target, {})
        parts[place] = tensor
        if len(parts) < count:
            continue
        ordered = [parts[i] for i in sorted(parts)]
        if padding := -vocab_size % _VOCABULARY_MULTIPLE if name in _VOCABULARY else 0:
            ordered.append(tensor.new_zeros(padding, *tensor.shape[1:]))
        sums[target] = sha256(ordered) if kind == "sha256" else mixed_words(ordered)
        del incomplete[target]
    return {name: s if isinstance(s, str) else finish(int(s)) for name, s in sums.items()}


def _server_parameter(name: str, experts: int) -> tuple[str, int, int]:
    """The server's name of the parameter that a tensor is part of, its place in it, and the number of parts."""
    if match := _EXPERT.fullmatch(name):
        prefix, number, part = match[1], int(match[2]), match[3]
        if part == "down":
            return f"{prefix}.w2_weight", number, experts
        return f"{prefix}.w13_weight", 2 * number + (part == "up"), 2 * experts
    *prefixes, module, leaf = name.split(".")
    if module not in _JOINED:
        return name, 0, 1
    joined, place = _JOINED[module]
    return ".".join([*prefixes, joined, leaf]), place, _PARTS[joined]


def sha256(parts: Sequence[Tensor]) -> str:
    """The first eight bytes of the SHA-256 of a parameter given in parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def mixed_words(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the tiles of a parameter given in parts: a scalar on its device, so that nothing waits for the GPU here."""
    pieces = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    if missing := -sum(p.numel() for p in pieces) % 4:
        pieces.append(pieces[0].new_zeros(missing))
    words = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(torch.int32)
    total = words.new_zeros((), dtype=torch.int64)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK]
        padding = -chunk.numel() % TILE
        index = torch.arange(chunk.numel() + padding, dtype=torch.int32, device=words.device)
        index += _signed(start & 0xFFFFFFFF)
        padded = F.pad(chunk, (0, padding)) if padding else chunk
        halves = []
        for factor, addend, rotation in _PLACES:
            mixed = index * _signed(factor)
            mixed += _signed(addend)
            mixed ^= (index << rotation) | _shift_right(index, 32 - rotation)
            mixed ^= padded
            _mix(mixed)[chunk.numel() :] = 0
            sums = mixed.view(-1, TILE).sum(1, dtype=torch.int32)
            halves.append(_mix(sums ^ _signed(4 * words.numel() & 0xFFFFFFFF)).to(torch.int64))
        high, low = halves
        total += ((high << 32) | (low & 0xFFFFFFFF)).sum()
    return total


def finish(total: int) -> str:
    """The checksum, 16 hexadecimal digits, from the sum of the tiles."""
    x = total & _MASK64
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return f"{x ^ (x >> 31):016x}"


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser in place."""
    x ^= _shift_right(x, 16)
    x *= _signed(0x85EBCA6B)
    x ^= _shift_right(x, 13)
    x *= _signed(0xC2B2AE35)
    x ^= _shift_right(x, 16)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of signed integers."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(x: int) -> int:
    """The signed 32-bit integer with the same bits."""
    return x - (1 << 32) if x >> 31 else x
