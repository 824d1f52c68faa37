"""The attention of a token tree as few calls of a kernel that knows sequences only. No torch.

Every query attends to its own path up to itself and, on each path above it, to the tokens from which its path branches. The first is one
causal sequence for each path. The second is a staircase: the branches of a path, in order, see longer and longer prefixes of it. A staircase is
cut into full rectangles by halving: what all branches see, then what the second half of them sees, and so on, so that m branches take
1 + ⌈log₂ m⌉ rectangles for each query, of which the queries and the keys are contiguous in the layout. Rectangles without a common query
are one call. The results of the calls are merged by their log-sum-exp (megatron/tree_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.train.token_tree import Path

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Large:
    """The rectangles that a kernel for long sequences computes (megatron/attention_kernels.py)."""

    pairs: int
    """of a query and a key, at least"""
    multiple: int
    """of which the number of keys is a multiple"""

    def has(self, queries: int, keys: int) -> bool:
        """Whether a rectangle of this size is one of them."""
        return queries * keys >= self.pairs and keys % self.multiple == 0


LARGE = Large(12 << 20, 512)
"""For other numbers of keys, a large rectangle and the rest of the keys took as long as one rectangle of torch's flash kernel (H200)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that attend to keys."""

    queries: Range
    """in the layout"""
    keys: Range
    """in the layout"""


@dataclass(frozen=True, slots=True)
class Call:
    """Blocks without a common query, in the order of their queries."""

    blocks: tuple[Block, ...]
    causal: bool
    """the queries and the keys of a block are the same tokens, and a query attends to the keys up to itself; otherwise to all"""


def attention_calls(paths: Sequence[Path], local: Sequence[Range], *, large: Large = LARGE) -> list[Call]:
    """The calls that compute the attention of the queries in the ranges `local`.

    Together, a query's blocks hold each of its ancestors and itself once. The first call is the causal one, and holds every query.

    Args:
        paths: of a `TokenTree`.
        local: ranges of the layout, in order; the whole layout, or this context-parallel rank's part.
        large: rectangles that are calls of their own.

    Example:
        >>> from agentrl.train.token_tree import token_tree
        >>> tree = token_tree([np.array([5, 6, 7]), np.array([5, 6, 8])])
        >>> attention_calls(tree.paths, [(0, 4)])
        [Call(blocks=(Block(queries=(0, 3), keys=(0, 3)), Block(queries=(3, 4), keys=(3, 4))), causal=True), \
Call(blocks=(Block(queries=(3, 4), keys=(0, 2)),), causal=False)]
    """
    own, rectangles = [], []
    for path in paths:
        for part in _clip((path.start, path.stop), local):
            own.append(Block(part, part))
            if part[0] > path.start:
                rectangles.append(Block(part, (path.start, part[0])))
    for block in _staircases(paths):
        rectangles += [Block(part, block.keys) for part in _clip(block.queries, local)]
    groups = [[block] for block in rectangles if _is(block, large)]
    groups += _disjoint([block for block in rectangles if not _is(block, large)])
    own.sort(key=lambda block: block.queries)
    return [Call(tuple(own), True), *(Call(tuple(blocks), False) for blocks in groups)]


def _is(block: Block, large: Large) -> bool:
    return large.has(block.queries[1] - block.queries[0], block.keys[1] - block.keys[0])


def _clip(span: Range, local: Sequence[Range]) -> list[Range]:
    parts = [(max(span[0], a), min(span[1], b)) for a, b in local]
    return [(a, b) for a, b in parts if a < b]


def _staircases(paths: Sequence[Path]) -> Iterator[Block]:
    branches: list[list[Path]] = [[] for _ in paths]
    for path in paths:
        if path.parent >= 0:
            branches[path.parent].append(path)
    for path, own in zip(paths, branches, strict=True):
        if own:
            yield from _staircase(path, own, path.start)


def _staircase(path: Path, branches: Sequence[Path], seen: int) -> Iterator[Block]:
    """The rectangles of consecutive branches with the keys of `path` from `seen` on."""
    while branches:
        stop = path.start + branches[0].attach
        if stop > seen:
            yield Block((branches[0].start, branches[-1].end), (seen, stop))
        rest = [b for b in branches if b.attach > branches[0].attach]
        middle = len(rest) // 2
        yield from _staircase(path, rest[:middle], stop)
        branches, seen = rest[middle:], stop


def _disjoint(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks in the fewest groups in which no two have a common query: each goes to the first group that is free (interval colouring)."""
    groups: list[list[Block]] = []
    for block in sorted(blocks, key=lambda b: (b.queries, b.keys)):
        free = next((g for g in groups if g[-1].queries[1] <= block.queries[0]), None)
        if free is None:
            groups.append([block])
        else:
            free.append(block)
    return groups
