"""The batch plan: which rows go to which data-parallel rank and micro-batch. Deterministic; no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Row numbers of each rank, with similar sums of lengths: the longest row first, to the rank with the fewest tokens."""
    loads = [(0, rank) for rank in range(ranks)]
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        rows[rank].append(row)
        heapq.heappush(loads, (load + lengths[row], rank))
    return rows


def split(lengths: Sequence[int], rows: Sequence[int], max_tokens: int, max_rows: int | None = None) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens, padding included, longest rows first. A longer row is a micro-batch by itself.

    `max_rows`: at most so many rows each; None: no such bound.
    """
    parts: list[list[int]] = []
    width = 0
    for row in sorted(rows, key=lambda i: (-lengths[i], i)):
        if not parts or (len(parts[-1]) + 1) * width > max_tokens or len(parts[-1]) == max_rows:
            parts.append([])
            width = max(lengths[row], 1)
        parts[-1].append(row)
    return parts


def batch_plan(
    lengths: Sequence[int], ranks: int, max_tokens: int, max_rows: int | None = None
) -> list[list[list[int]]]:
    """Row numbers by rank and micro-batch. All ranks have the same number of micro-batches, at least one; some may be empty."""
    plan = [split(lengths, rows, max_tokens, max_rows) for rows in balance(lengths, ranks)]
    count = max(1, *map(len, plan))
    return [parts + [[]] * (count - len(parts)) for parts in plan]
