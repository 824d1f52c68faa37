"""Which rows go to which data-parallel rank and micro-batch: dealt by length, cut by length. Deterministic, and no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Share rows out so that the sums of lengths are close: longest first, to whoever has least. Returns row numbers per share."""
    heap = [(0, i) for i in range(shares)]
    out: list[list[int]] = [[] for _ in range(shares)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, share = heapq.heappop(heap)
        out[share].append(row)
        heapq.heappush(heap, (load + lengths[row], share))
    return out


def split(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows, longest first, into micro-batches of at most `max_tokens` tokens, padding included; a longer row stands alone."""
    out: list[list[int]] = []
    width = 0
    for row in sorted(rows, key=lambda i: (-lengths[i], i)):
        if not out or (len(out[-1]) + 1) * width > max_tokens:
            out.append([])
            width = max(lengths[row], 1)
        out[-1].append(row)
    return out


def plan(lengths: Sequence[int], shares: int, max_tokens: int) -> list[list[list[int]]]:
    """Row numbers per share and micro-batch. All shares get equally many micro-batches (some empty), at least one."""
    shared = [split(lengths, rows, max_tokens) for rows in deal(lengths, shares)]
    most = max(1, *(len(s) for s in shared))
    return [s + [[]] * (most - len(s)) for s in shared]
