"""Rows as a tree of tokens: a prefix that several rows share is in it once. No torch.

The trie of the rows is divided into heavy paths (Sleator & Tarjan 1983, A data structure for dynamic trees, §3.1): from a path's first token,
the path continues into the subtree with the most tokens; every other subtree starts a path. The tokens of a path are contiguous in the
layout, and so are the tokens of a subtree, which is what the attention (attention_blocks.py) needs. Rows that share nothing are the case of
one path for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = NDArray[Any]
"""Token ids of one row, one dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A run of tokens, each the parent of the next. All positions are in the layout of the tree, except `attach`."""

    start: int
    """its first token"""
    stop: int
    """one past its last token"""
    end: int
    """one past the last token of the subtree below `start`"""
    parent: int = -1
    """the path that it branches from; -1: none"""
    attach: int = 0
    """number of the parent path's own tokens that are ancestors"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """The unique tokens of some rows, n in number, in their layout."""

    tokens: Ints
    """[n] token ids"""
    positions: Ints
    """[n] depth in the tree, which is the position in every row that has the token"""
    paths: tuple[Path, ...]
    """in the order of the layout; a parent comes before its branches, and branches in the order of `attach`"""
    rows: tuple[Ints, ...]
    """for each row, where its tokens are in the layout"""

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key in causal attention: every token attends to its ancestors and itself."""
        return int(self.positions.sum()) + len(self.positions)


def token_tree(rows: Sequence[Tokens], *, share: bool = True) -> TokenTree:
    """The tree of some rows.

    Args:
        rows: token ids of each row; a row may be empty.
        share: False: no prefix is shared, and every row has its own path.

    Example:
        >>> tree = token_tree([np.array([5, 6, 7]), np.array([5, 6, 8])])
        >>> tree.tokens.tolist(), tree.positions.tolist(), tree.rows[1].tolist()
        ([5, 6, 7, 8], [0, 1, 2, 2], [0, 1, 3])
    """
    if share:
        order = lexicographic_order(rows)
        builder = _Builder([rows[i] for i in order], common_prefixes([rows[i] for i in order]))
    else:
        order = list(range(len(rows)))
        builder = _Builder(list(rows), [0] * len(rows))
    builder.build()
    where: list[Ints] = [np.zeros(0, np.int64)] * len(rows)
    for place, row in enumerate(order):
        if len(rows[row]):
            where[row] = builder.prefixes[builder.path_of[place]][: len(rows[row])]
    empty: list[Ints] = [np.zeros(0, np.int64)]
    return TokenTree(
        tokens=np.concatenate(builder.tokens or empty),
        positions=np.concatenate(builder.positions or empty),
        paths=tuple(builder.paths),
        rows=tuple(where),
    )


def lexicographic_order(rows: Sequence[Tokens]) -> list[int]:
    """Row numbers in the lexicographic order of their token ids: rows with the longest common prefixes are neighbours."""
    keys = [np.asarray(row, ">u4").tobytes() for row in rows]
    return sorted(range(len(rows)), key=lambda i: (keys[i], i))


def common_prefixes(rows: Sequence[Tokens]) -> list[int]:
    """The length of each row's common prefix with the row before it; 0 for the first."""
    lengths = [0] * len(rows)
    for i in range(1, len(rows)):
        n = min(len(rows[i - 1]), len(rows[i]))
        differs = np.flatnonzero(rows[i - 1][:n] != rows[i][:n])
        lengths[i] = int(differs[0]) if len(differs) else n
    return lengths


@dataclass(slots=True)
class _Builder:
    """Builds the paths from rows in lexicographic order and their common prefixes."""

    rows: list[Tokens]
    common: list[int]
    paths: list[Path] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    positions: list[Ints] = field(default_factory=list)
    prefixes: list[Ints] = field(default_factory=list)
    """for each path, where the tokens from the root to its last one are"""
    path_of: list[int] = field(default_factory=list)
    """for each row, the path on which it ends"""
    _sums: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    _size: int = 0

    def build(self) -> None:
        """Fill the lists."""
        new = [len(row) - shared for row, shared in zip(self.rows, self.common, strict=True)]
        self._sums = np.concatenate([[0], np.cumsum(new)]).astype(np.int64)
        self.path_of = [0] * len(self.rows)
        for low, high in self._groups(0, len(self.rows), 0):
            self._grow(low, high, depth=0, parent=-1, attach=0)

    def _groups(self, low: int, high: int, depth: int) -> Iterator[tuple[int, int]]:
        """Ranges of the rows [low, high) that have the same token at `depth`; rows that end there are in none."""
        starts = [i for i in range(low, high) if i == low or self.common[i] <= depth]
        for start, stop in zip(starts, [*starts, high][1:], strict=True):
            if len(self.rows[stop - 1]) > depth:
                yield start, stop

    def _count(self, low: int, high: int, depth: int) -> int:
        """Unique tokens of the rows [low, high) below `depth`, up to which they are equal."""
        return int(len(self.rows[low]) - depth + self._sums[high] - self._sums[low + 1])

    def _grow(self, low: int, high: int, *, depth: int, parent: int, attach: int) -> None:
        """Add the path that starts at `depth` of the rows [low, high), and its branches."""
        number, start, top = len(self.paths), self._size, depth
        self.path_of[low:high] = [number] * (high - low)
        branches: list[tuple[int, int, int]] = []
        while True:
            depth = len(self.rows[low]) if high - low == 1 else min(self.common[low + 1 : high])
            children = list(self._groups(low, high, depth))
            if not children:
                break
            counts = [self._count(a, b, depth) for a, b in children]
            heavy = counts.index(max(counts))
            branches += [(depth - top, a, b) for i, (a, b) in enumerate(children) if i != heavy]
            low, high = children[heavy]
        own = np.arange(start, start + depth - top, dtype=np.int64)
        self._size += len(own)
        self.tokens.append(self.rows[low][top:depth].astype(np.int64))
        self.positions.append(np.arange(top, depth, dtype=np.int64))
        above = self.prefixes[parent][:top] if parent >= 0 else own[:0]
        self.prefixes.append(np.concatenate([above, own]))
        self.paths.append(Path(start=start, stop=self._size, end=self._size, parent=parent, attach=attach))
        for at, a, b in branches:
            self._grow(a, b, depth=top + at, parent=number, attach=at)
        path = self.paths[number]
        self.paths[number] = Path(start=start, stop=path.stop, end=self._size, parent=parent, attach=attach)
