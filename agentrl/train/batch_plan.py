"""The batch plan: which rows go to which data-parallel rank and micro-batch. Deterministic; no torch.

A micro-batch is packed without padding, as a token tree (token_tree.py): a prefix that its rows share is computed once. In lexicographic order,
rows that share a prefix are neighbours (the rows of a group, the segments of an episode), so micro-batches are consecutive rows in that order,
cut where the least is shared. A prefix that is shared across a cut is computed in both micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.train.base import Row, Trainer
from agentrl.train.token_tree import Tokens, common_prefixes, lexicographic_order

ATTENTION_PAIRS_PER_TOKEN = 8192
"""Attention pairs (query, key) that cost as much as the linear layers of one token: about 6 × hidden size for models of the Llama kind."""
MICRO_BATCH_COST = 256
"""Tokens that may be computed twice to save a micro-batch."""
Plan = Sequence[Sequence[Sequence[int]]]
"""Row numbers by data-parallel rank and micro-batch"""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHARES = (1, 5 / 4, 3 / 2, 1 / 2, 5 / 8, 1 / 4, 5 / 16)
"""Limits of a micro-batch, as parts of a rank's share of all tokens, that the plan tries in order to balance the ranks."""


class _Part(NamedTuple):
    rows: list[int]
    tokens: int
    cost: float


def batch_plan(
    rows: Sequence[Tokens], ranks: int, max_tokens: int, max_rows: int | None = None, *, tree: bool = True
) -> list[list[list[int]]]:
    """Row numbers by data-parallel rank and micro-batch.

    All ranks have the same number of micro-batches, at least one; some may be empty.

    Args:
        rows: token ids of each row. The last token of a row is predicted and is not an input.
        ranks: data-parallel ranks.
        max_tokens: maximum unique tokens of a micro-batch. A longer row is a micro-batch by itself.
        max_rows: maximum rows of a micro-batch; None: no such bound.
        tree: False: rows share nothing.

    Example:
        >>> import numpy as np
        >>> batch_plan([np.arange(9), np.arange(9), np.arange(5, 9)], ranks=1, max_tokens=11)
        [[[0, 1, 2]]]
    """
    inputs = [row[:-1] for row in rows]
    order = lexicographic_order(inputs) if tree else sorted(range(len(rows)), key=lambda i: (-len(inputs[i]), i))
    ordered = [inputs[i] for i in order]
    shared = common_prefixes(ordered) if tree else [0] * len(rows)
    total = sum(map(len, ordered)) - sum(shared)
    most = max_rows or len(rows)
    limits = [max_tokens, *(math.ceil(total / ranks * part) for part in _SHARES if ranks > 1)]
    plans = [
        _assign(_cut(ordered, shared, limit, most) if tree else _fill(ordered, limit, most), ranks)
        for limit in dict.fromkeys(min(limit, max_tokens) for limit in limits)
    ]
    plan = min(plans, key=lambda plan: max(sum(part.cost for part in parts) for parts in plan))
    count = max(1, *map(len, plan))
    return [[[order[i] for i in part.rows] for part in parts] + [[]] * (count - len(parts)) for parts in plan]


def trainer_plan(trainer: Trainer, rows: Sequence[Row]) -> list[list[list[int]]]:
    """The batch plan of a trainer for some rows."""
    limit = max(1, trainer.micro_batch_tokens // trainer.multiple) * trainer.multiple
    return batch_plan(prefix_keys(rows), trainer.copies, limit, trainer.micro_batch_rows, tree=trainer.tree_packing)


def micro_batch_sizes(trainer: Trainer, rows: Sequence[Row], plan: Plan) -> list[list[int]]:
    """Tokens of each micro-batch of a plan, with padding."""
    return [[padded_length(_inputs(trainer, rows, part), trainer.multiple) for part in parts] for parts in plan]


def packing(trainer: Trainer, rows: Sequence[Row], plan: Plan) -> dict[str, float]:
    """Metrics of a plan.

    `row_tokens` are the input tokens of the rows, `tree_tokens` those that are computed, fewer where rows share prefixes, and `padding_tokens`
    are computed in addition.
    """
    computed = sum(_inputs(trainer, rows, part) for parts in plan for part in parts)
    return {
        "row_tokens": float(sum(max(len(r.tokens) - 1, 0) for r in rows)),
        "tree_tokens": float(computed),
        "padding_tokens": float(sum(map(sum, micro_batch_sizes(trainer, rows, plan))) - computed),
    }


def padded_length(tokens: int, multiple: int) -> int:
    """Tokens of a micro-batch with padding: at least one, and a multiple."""
    return -(-max(tokens, 1) // multiple) * multiple


def input_tokens(rows: Sequence[Tokens], *, tree: bool) -> int:
    """Tokens of a micro-batch of these rows, without padding."""
    inputs = [row[:-1] for row in rows]
    if not tree:
        return sum(map(len, inputs))
    inputs = [inputs[i] for i in lexicographic_order(inputs)]
    return sum(map(len, inputs)) - sum(common_prefixes(inputs))


def _inputs(trainer: Trainer, rows: Sequence[Row], part: Sequence[int]) -> int:
    return input_tokens(prefix_keys([rows[i] for i in part]), tree=trainer.tree_packing)


def prefix_keys(rows: Sequence[Row]) -> list[Tokens]:
    """For each token of each row a number: a prefix is computed once for two rows if the numbers of its tokens are equal in both.

    These are the token ids. A token of an image has a number for that image, and where the engine's experts are replayed, a number stands for the
    token and its experts: a token that was recorded with other experts has other hidden states. It is found by a hash of 64 bits;
    `image_layout` and `recorded_experts` compare the images and experts themselves.
    """
    if all(row.routed_experts is None and not row.images for row in rows):
        return [row.tokens for row in rows]
    _, numbers = np.unique(np.concatenate([_hashes(row) for row in rows]), return_inverse=True)
    return np.split(numbers.reshape(-1), np.cumsum([len(row.tokens) for row in rows])[:-1])


def _hashes(row: Row) -> NDArray[np.uint64]:
    """A linear hash of each token, its image and its experts, with random odd factors."""
    experts = row.routed_experts
    hashes = row.tokens.astype(np.uint64) * _FACTOR
    for placed in row.images:
        hashes[placed.at : placed.at + placed.tokens] += np.uint64(int(placed.image.sha256[:16], 16))
    if experts is not None:
        factors = np.random.default_rng(0).integers(0, 1 << 64, experts.shape[1:], np.uint64) | np.uint64(1)
        for layer, own in enumerate(factors):
            hashes[: len(experts)] += (experts[:, layer].astype(np.uint64) + np.uint64(1)) @ own
    return hashes


def _part(rows: Sequence[Tokens], shared: Sequence[int], numbers: Sequence[int]) -> _Part:
    """A micro-batch of consecutive rows."""
    tokens, pairs = 0, 0
    for i in numbers:
        above, length = (shared[i] if i != numbers[0] else 0), len(rows[i])
        tokens += length - above
        pairs += (length * (length + 1) - above * (above + 1)) // 2
    return _Part(list(numbers), tokens, tokens + pairs / ATTENTION_PAIRS_PER_TOKEN)


def _cut(rows: Sequence[Tokens], shared: Sequence[int], limit: int, most: int) -> list[_Part]:
    """Cut rows in lexicographic order into micro-batches, at the least cost in tokens repeated and in micro-batches.

    costs[j] is the least cost of the first j rows, and first[j - 1] the first row of the last micro-batch of them.
    """
    costs, first = [0], []
    for j in range(1, len(rows) + 1):
        options, added = [], 0
        for i in range(j - 1, max(j - most, 0) - 1, -1):
            if len(rows[i]) + added > limit and i < j - 1:
                break
            options.append((costs[i] + shared[i] + MICRO_BATCH_COST, i))
            added += len(rows[i]) - shared[i]
        cost, i = min(options)
        costs.append(cost)
        first.append(i)
    parts, stop = [], len(rows)
    while stop:
        parts.append(_part(rows, shared, range(first[stop - 1], stop)))
        stop = first[stop - 1]
    return parts[::-1]


def _fill(rows: Sequence[Tokens], limit: int, most: int) -> list[_Part]:
    """Rows that share nothing, longest first: each goes to the first micro-batch with enough room (first-fit decreasing)."""
    numbers: list[list[int]] = []
    room: list[int] = []
    for i, row in enumerate(rows):
        place = next((n for n, left in enumerate(room) if len(row) <= left and len(numbers[n]) < most), None)
        if place is None:
            numbers.append([i])
            room.append(limit - len(row))
        else:
            numbers[place].append(i)
            room[place] -= len(row)
    return [_part(rows, [0] * len(rows), n) for n in numbers]


def _assign(parts: Sequence[_Part], ranks: int) -> list[list[_Part]]:
    """Micro-batches of each rank, with similar sums of costs: the most expensive first, to the rank with the least."""
    loads = [(0.0, rank) for rank in range(ranks)]
    plan: list[list[_Part]] = [[] for _ in range(ranks)]
    for part in sorted(parts, key=lambda p: (-p.cost, p.rows)):
        load, rank = heapq.heappop(loads)
        plan[rank].append(part)
        heapq.heappush(loads, (load + part.cost, rank))
    return plan
