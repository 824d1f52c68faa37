"""The local engine's KV cache in blocks of fixed size, and the rule that makes it bit-exact at any load.

A session's tokens are computed in *chunks*: the new part of a context is cut into prefill chunks of at most a fixed length, counted from where
it starts, and every sampled token is a chunk by itself. The shapes in which a chunk's attention is computed depend only on the chunk (its
length and the blocks before it), never on other requests. The chunk boundaries outlive the keys and values: when those are freed (preemption,
sleep, new weights), the same chunks are computed again in the same shapes, which gives the same bits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.core.routed_experts import RoutedExperts

BLOCK = 64
"""tokens of one block"""


class BlockPool:
    """Key and value blocks of all layers: per layer `[blocks, kv_heads, BLOCK, head_dim]`, zero where never written.

    Block 0 is never allocated: padding points at it. Low numbers are allocated first, so the blocks in use stay close together.
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
        """Number of allocated blocks."""
        return self._size - 1 - len(self._free)

    @property
    def size(self) -> int:
        """Number of blocks so far, free ones included."""
        return self._size

    def allocate(self) -> int:
        """A free block."""
        if self._free:
            return heapq.heappop(self._free)
        self._size += 1
        return self._size - 1

    def free(self, blocks: Sequence[int]) -> None:
        """Return blocks. Their contents stay until they are overwritten; attention masks them."""
        for block in blocks:
            heapq.heappush(self._free, block)

    @torch.inference_mode()
    def erase(self, blocks: Sequence[int]) -> None:
        """Set blocks to zero."""
        for keys, values in self._layers.values():
            keys[blocks], values[blocks] = 0, 0

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, with memory for all blocks. `key` and `value` `[1, kv_heads, tokens, head_dim]` give the shapes."""
        cached = self._layers.get(index)
        if cached is None or cached[0].shape[0] < self._size:
            cached = self._layers[index] = (
                self._grow(cached and cached[0], key),
                self._grow(cached and cached[1], value),
            )
        return cached

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
    """The tokens of one episode, their chunks, and the blocks that hold their keys and values."""

    key: str
    ids: list[int] = field(default_factory=list)
    chunk_ends: list[int] = field(default_factory=list)
    """ascending; the last is len(ids)"""
    computed_chunks: int = 0
    """chunks whose keys and values are in `blocks`"""
    blocks: list[int] = field(default_factory=list)
    has_slot: bool = False
    """it may hold blocks"""
    active: Any = None
    """the request being served"""
    queue: deque[Any] = field(default_factory=deque)
    """requests that wait for the active one"""
    last_used: int = 0
    experts: list[NDArray[Any]] = field(default_factory=list)
    """[layers, topk] for each of the first tokens: its routed experts, as they were when it was computed first; empty: not recorded"""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose keys and values are in `blocks`."""
        return self.chunk_ends[self.computed_chunks - 1] if self.computed_chunks else 0

    def set_context(self, context: Sequence[int], pool: BlockPool, max_chunk: int) -> int:
        """Replace the tokens by `context`; returns the number of cached tokens.

        Chunks that the two share are kept, the rest is cut into chunks of at most `max_chunk` tokens. At least the last token is left to
        compute, since its logits are required.
        """
        common = _common_prefix(self.ids, context, len(context) - 1)
        kept_chunks = bisect_right(self.chunk_ends, common)
        start = self.chunk_ends[kept_chunks - 1] if kept_chunks else 0
        del self.ids[start:], self.chunk_ends[kept_chunks:], self.experts[start:]
        self.computed_chunks = min(self.computed_chunks, kept_chunks)
        needed_blocks = -(-self.computed_tokens // BLOCK)
        pool.free(self.blocks[needed_blocks:])
        del self.blocks[needed_blocks:]
        self.ids.extend(context[start:])
        self.chunk_ends.extend(range(start + max_chunk, len(context), max_chunk))
        self.chunk_ends.append(len(context))
        return self.computed_tokens

    def record_experts(self, start: int, experts: NDArray[Any]) -> None:
        """Keep the experts of the tokens from `start` on, except where they are known: tokens were sampled with these."""
        self.experts.extend(experts[max(0, len(self.experts) - start) :])

    def experts_from(self, start: int | None) -> RoutedExperts | None:
        """The experts of the tokens from `start` on; None: not requested, or not recorded."""
        if start is None or not self.experts:
            return None
        return RoutedExperts.of(np.stack(self.experts[start:]))

    def append(self, token: int) -> None:
        """Add a sampled token as a chunk."""
        self.ids.append(token)
        self.chunk_ends.append(len(self.ids))

    def allocate(self, end: int, pool: BlockPool) -> None:
        """Hold blocks for the first `end` tokens."""
        while len(self.blocks) * BLOCK < end:
            self.blocks.append(pool.allocate())

    def free(self, pool: BlockPool) -> None:
        """Free the blocks. Tokens and chunk boundaries stay."""
        pool.free(self.blocks)
        self.blocks.clear()
        self.computed_chunks = 0


class Chunk(NamedTuple):
    """Consecutive tokens of a session that one forward computes."""

    session: Session
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.start


def _common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`. The usual case, a whole prefix, costs one comparison."""
    length = min(len(a), len(b), limit)
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
