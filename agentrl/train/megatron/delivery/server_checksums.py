"""Checksums of the weights as SGLang reports them (/weights_checker), so that both sides of a sync are compared parameter by parameter.

SGLang joins q, k and v, gate and up, and the experts of a layer, and pads the vocabulary with zeros. With tensor parallelism each
rank has a part of every tensor (`rank_part`) and reports checksums of its own parameters. Of a parameter's bytes it computes on a CPU ("sha256") the
first eight bytes of the SHA-256, and on a GPU ("mix", 0.5.17 to 0.5.23) this:

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
from dataclasses import dataclass

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
_BY_ROWS = ("q_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_KEY_VALUE = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """How a server holds the weights."""

    vocab_size: int
    experts: int = 0
    """experts of a layer"""
    key_value_heads: int = 1
    ranks: int = 1
    """tensor-parallel size of the server"""

    @property
    def padded_vocab_size(self) -> int:
        """A multiple of 64, or of 64 × ranks if the ranks do not divide that."""
        multiple = _VOCABULARY_MULTIPLE
        if -(-self.vocab_size // multiple) * multiple % self.ranks:
            multiple *= self.ranks
        return -(-self.vocab_size // multiple) * multiple


@torch.no_grad()
def server_checksums(tensors: Iterable[tuple[str, Tensor]], layout: ServerLayout, kind: str) -> dict[str, str]:
    """The checksum of each server parameter, by the server's name, with several ranks by `of_rank`.

    `tensors`: Hugging Face (name, tensor) in any order.
    The parts of a parameter are kept until it is complete, those of a mixture of experts thus until all experts of a layer are there.
    """
    incomplete: dict[str, dict[int, tuple[str, Tensor]]] = {}
    sums: dict[str, str | Tensor] = {}
    for name, tensor in tensors:
        target, place, count = _server_parameter(name, layout.experts)
        parts = incomplete.setdefault(target, {})
        parts[place] = name, tensor
        if len(parts) < count:
            continue
        ordered = [parts[i] for i in sorted(parts)]
        for rank in range(layout.ranks):
            own = [piece for part in ordered for piece in rank_part(*part, rank, layout)]
            sums[of_rank(target, rank, layout.ranks)] = sha256(own) if kind == "sha256" else mixed_words(own)
        del incomplete[target]
    return {name: s if isinstance(s, str) else finish(int(s)) for name, s in sums.items()}


def of_rank(name: str, rank: int, ranks: int) -> str:
    """The name of a rank's parameter, for messages and comparison."""
    return name if ranks == 1 else f"rank {rank}: {name}"


def rank_part(name: str, tensor: Tensor, rank: int, layout: ServerLayout) -> list[Tensor]:
    """What a tensor-parallel rank of the server has of a tensor, in pieces that follow one another.

    As `ColumnParallelLinear`, `RowParallelLinear`, `QKVParallelLinear` and `VocabParallelEmbedding` of SGLang divide it: rows of q, gate and up,
    columns of o and down, rows of the padded vocabulary, the heads of k and v (which several ranks share where there are more ranks than heads).
    """
    ranks, module = layout.ranks, name.rpartition(".")[0].rpartition(".")[2]
    if name in _VOCABULARY:
        size = layout.padded_vocab_size // ranks
        rows = tensor[rank * size : (rank + 1) * size]
        padding = size - len(rows)
        return [rows, *([tensor.new_zeros(padding, *tensor.shape[1:])] if padding else [])]
    if ranks == 1:
        return [tensor]
    if module in _BY_ROWS:
        return [tensor.chunk(ranks)[rank]]
    if module in _BY_COLUMNS and tensor.dim() > 1:
        return [tensor.chunk(ranks, 1)[rank]]
    if module in _KEY_VALUE:
        parts = min(ranks, layout.key_value_heads)
        return [tensor.chunk(parts)[rank * parts // ranks]]
    return [tensor]


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
