"""Keys and values of the local engine's sessions, in blocks of fixed size, and the rule that keeps their bits the same at any load.

The rule. A session's tokens are computed in *pieces*: the new part of each context cut every so many tokens from where it starts,
and every sampled token on its own. A piece's attention is computed in shapes that follow from the piece alone (its length and the
blocks before it), never from what else runs. The piece ends outlive the keys and values: when those are dropped (eviction, sleep,
new weights), the same pieces are computed again, in the same shapes, to the same bits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCK = 64
"""tokens of one block"""


class BlockPool:
    """Key and value blocks of all layers: per layer `[blocks, kv_heads, BLOCK, head_dim]`, zero where never written.

    Block 0 belongs to nobody: padding points at it. Low numbers are handed out first, so the blocks in use stay close together.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Forget all blocks and their memory."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._size = 1
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Blocks that sessions hold."""
        return self._size - 1 - len(self._free)

    @property
    def size(self) -> int:
        """Blocks numbered so far: every block in use has a lower number."""
        return self._size

    def take(self) -> int:
        """A free block."""
        if self._free:
            return heapq.heappop(self._free)
        self._size += 1
        return self._size - 1

    def give(self, blocks: Sequence[int]) -> None:
        """Return blocks; what they hold stays until it is overwritten (masked, always finite)."""
        for block in blocks:
            heapq.heappush(self._free, block)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, made or grown to hold all blocks; `key`, `value` `[1, kv_heads, tokens, head_dim]` give the shapes."""
        held = self._layers.get(index)
        if held is None or held[0].shape[0] < self._size:
            held = self._layers[index] = (self._grow(held and held[0], key), self._grow(held and held[1], value))
        return held

    def _grow(self, old: Tensor | None, like: Tensor) -> Tensor:
        blocks = 64
        while blocks < self._size:
            blocks *= 2
        new = torch.zeros(blocks, like.shape[1], BLOCK, like.shape[3], dtype=like.dtype, device=self.device)
        if old is not None:
            new[: old.shape[0]] = old
        return new


@dataclass(slots=True, eq=False)
class Session:
    """One episode's tokens as the engine knows them, in pieces, and the blocks that hold their keys and values."""

    key: str
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """where each piece ends, ascending; the last is len(ids)"""
    done: int = 0
    """pieces whose keys and values are in `blocks`"""
    blocks: list[int] = field(default_factory=list)
    slot: bool = False
    """it may hold blocks"""
    active: Any = None
    """the request it serves now"""
    queue: deque[Any] = field(default_factory=deque)
    """requests that wait for the active one"""
    last_used: int = 0

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are held."""
        return self.ends[self.done - 1] if self.done else 0

    def begin(self, context: Sequence[int], pool: BlockPool, piece: int) -> int:
        """Take a context: keep the whole pieces it shares with what is known, cut the rest every `piece` tokens. Returns the cached tokens.

        At least the last token is left to compute, since its logits are needed.
        """
        common = _common_prefix(self.ids, context, len(context) - 1)
        keep = bisect_right(self.ends, common)
        start = self.ends[keep - 1] if keep else 0
        del self.ids[start:], self.ends[keep:]
        self.done = min(self.done, keep)
        needed = -(-self.computed // BLOCK)
        pool.give(self.blocks[needed:])
        del self.blocks[needed:]
        self.ids.extend(context[start:])
        self.ends.extend(range(start + piece, len(context), piece))
        self.ends.append(len(context))
        return self.computed

    def append(self, token: int) -> None:
        """Add a sampled token: a piece of its own."""
        self.ids.append(token)
        self.ends.append(len(self.ids))

    def reserve(self, end: int, pool: BlockPool) -> None:
        """Hold blocks for the first `end` tokens."""
        while len(self.blocks) * BLOCK < end:
            self.blocks.append(pool.take())

    def drop(self, pool: BlockPool) -> None:
        """Give the blocks back; tokens and piece ends stay."""
        pool.give(self.blocks)
        self.blocks.clear()
        self.done = 0


def _common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many leading ids agree, at most `limit`; one comparison when all of them do."""
    n = min(len(a), len(b), limit)
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
