"""The checksum of a tensor that SGLang computes on a GPU (0.5.17 to 0.5.23), in integer operations that every device of torch has.

The bytes are 32-bit words w_i. In each tile of 8192 words, two sums of mix(w_i xor place(i)) are taken modulo 2^32, with different places; each,
xor the number of bytes, is mixed again, and the two make a word of 64 bits. These are added up modulo 2^64 and mixed a last time. `mix` is the
finaliser of MurmurHash3 for 32 bits, the last step that of SplitMix64 without its first addition (Steele, Lea, Flood 2014, fig. 13).
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 8192
_AT_ONCE = 512 * TILE
"""words: small enough to stay in a GPU's cache from one operation to the next"""
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_FACTORS = (0x27D4EB2D, 0x165667B1)
_TURNS = (15, 13)
_LOW = 0xFFFFFFFF


@torch.no_grad()
def word_mix(tensor: Tensor) -> int:
    """The checksum, 64 bits; 0 of an empty tensor."""
    words = _words(tensor)
    if not words.numel():
        return 0
    places = torch.arange(min(_AT_ONCE, words.numel()), dtype=torch.int32, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        place = places[: part.numel()] + _signed(start)
        high, low = (_tiles(part, place, which, 4 * words.numel()) for which in (0, 1))
        total += ((high << 32) | low).sum()
    return _finish(int(total) & 0xFFFFFFFFFFFFFFFF)


def _words(tensor: Tensor) -> Tensor:
    """Its bytes as 32-bit words, filled up with zeros."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if missing := -content.numel() % 4:
        content = torch.cat([content, content.new_zeros(missing)])
    return content.view(torch.int32)


def _tiles(words: Tensor, place: Tensor, which: int, size: int) -> Tensor:
    """The first or second half of each tile's word, as 64-bit integers without sign."""
    turn = _TURNS[which]
    mixed = place * _signed(_FACTORS[which])
    mixed += _signed(_SEEDS[which])
    mixed ^= (place << turn) | _right(place, 32 - turn)
    mixed ^= words
    _mix(mixed)
    if missing := -mixed.numel() % TILE:
        mixed = torch.cat([mixed, mixed.new_zeros(missing)])
    sums = mixed.view(-1, TILE).sum(1).to(torch.int32)
    return _mix(sums ^ _signed(size)).to(torch.int64) & _LOW


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
    x = x * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The 32-bit integer with sign that has these bits."""
    x &= _LOW
    return x - (1 << 32) if x >> 31 else x
