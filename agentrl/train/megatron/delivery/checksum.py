"""The checksum of a tensor that SGLang computes on a GPU (0.5.17 to 0.5.23), in integer operations that every device of torch has.

The bytes are 32-bit words w_i. In each tile of 8192 words, two sums of mix(w_i xor place(i)) are taken modulo 2^32, with different places; each,
xor the number of bytes, is mixed again, and the two make a word of 64 bits. These are added up modulo 2^64 and mixed a last time. `mix` is the
finaliser of MurmurHash3 for 32 bits, the last step that of SplitMix64 without its first addition (Steele, Lea, Flood 2014, fig. 13).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TILE = 8192
TILES = 512
"""taken together, of as many tensors as it may be: 16 MiB, which stay in a GPU's cache from one operation to the next"""
_SEED = 0x243F6A88
_HALVES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, 13))
"""of a tile's word: factor, addend and turn of a place"""
_ALL = 0xFFFFFFFFFFFFFFFF


class WordMix:
    """The checksums of many tensors, one after the other."""

    def __init__(self) -> None:
        self._count = 0
        """of tensors"""
        self._words: Tensor | None = None
        """the tiles that are not summed yet: (TILES, TILE) 32-bit words"""
        self._tiles: list[np.ndarray] = []
        """of these, a column of tensor, first place, words, bytes of the tensor"""
        self._filled = 0
        self._sums: list[tuple[Tensor, np.ndarray]] = []
        """tiles' words, and which tensors they belong to"""

    @torch.no_grad()
    def add(self, parts: list[Tensor]) -> None:
        """The next tensor, in parts that follow each other."""
        words = _words(parts)
        if self._words is None:
            self._words = words.new_empty(TILES, TILE)
        start = 0
        while start < words.numel():
            taken = words[start : start + (TILES - self._filled) * TILE]
            self._words.view(-1)[self._filled * TILE :][: taken.numel()] = taken
            first = np.arange(start, start + taken.numel(), TILE)
            held = np.minimum(words.numel() - first, TILE)
            self._tiles.append(np.stack([0 * first + self._count, first, held, 0 * first + 4 * words.numel()]))
            self._filled += len(first)
            start += taken.numel()
            if self._filled == TILES:
                self._sum()
        self._count += 1

    @torch.no_grad()
    def finish(self) -> list[str]:
        """The checksums, 16 hexadecimal digits each; an empty tensor's are zeros."""
        if self._filled:
            self._sum()
        totals = [0] * self._count
        for sums, owners in self._sums:
            for owner, value in zip(owners.tolist(), sums.tolist(), strict=True):
                totals[owner] += value
        return [f"{_finish(total & _ALL):016x}" for total in totals]

    def _sum(self) -> None:
        """Make words of the tiles."""
        assert self._words is not None
        owners, *rest = np.concatenate(self._tiles, 1)
        words = self._words[: self._filled]
        first, held, size = torch.from_numpy(np.array(rest, np.uint32).view(np.int32)).to(words.device)[:, :, None]
        column = torch.arange(TILE, dtype=torch.int32, device=words.device)
        place, beyond = first + column, column >= held
        high, low = (_half(words, place, beyond, size, *half) for half in _HALVES)
        self._sums.append(((high << 32) | (low & 0xFFFFFFFF), owners))
        self._tiles, self._filled = [], 0


def _words(parts: list[Tensor]) -> Tensor:
    """Their bytes as 32-bit words, filled up with zeros."""
    pieces = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
    if missing := -sum(p.numel() for p in pieces) % 4:
        pieces.append(pieces[0].new_zeros(missing))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(torch.int32)


def _half(words: Tensor, place: Tensor, beyond: Tensor, size: Tensor, factor: int, addend: int, turn: int) -> Tensor:
    """One half of each tile's word, in 64 bits with sign."""
    mixed = place * _signed(factor)
    mixed += _signed(addend)
    mixed ^= (place << turn) | _right(place, 32 - turn)
    mixed ^= words
    sums = _mix(mixed).masked_fill_(beyond, 0).sum(1, keepdim=True).to(torch.int32)
    return _mix(sums ^ size).view(-1).to(torch.int64)


def _mix(x: Tensor) -> Tensor:
    """The finaliser, in place."""
    x ^= _right(x, 16)
    x *= _signed(0x85EBCA6B)
    x ^= _right(x, 13)
    x *= _signed(0xC2B2AE35)
    x ^= _right(x, 16)
    return x


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift without sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _finish(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _ALL
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _ALL
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The 32-bit integer with sign that has these bits."""
    return x - (1 << 32) if x >> 31 else x
