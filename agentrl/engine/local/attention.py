"""Attention over blocks of keys and values for rows of many sessions, whose result for a row does not depend on the other rows.

A forward sees one line of tokens: first the pieces of one token, then longer pieces, then padding. A single token meets every
block of its session in one batched product of fixed shape per block; the blocks' parts are then put together in the order of the
text (an online softmax with the true maximum). A longer piece has a product of its own. See `local_kv` for the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from agentrl.engine.local.kv_cache import BLOCK, BlockPool, Session

NAME = "agentrl_blocks"
"""under which transformers knows this attention"""
MIN_BLOCKS = 8
"""fewer are padded: a batch of one product could take another path in the library"""


@dataclass(slots=True)
class _Piece:
    """A piece of more than one token."""

    offset: int
    """of its first token in the line"""
    positions: Tensor
    """`[tokens]`"""
    blocks: Tensor
    """of its session, up to its last token"""

    def mask(self, window: int | None) -> Tensor:
        """`[tokens, blocks * BLOCK]`, 0 where a token may look, else -inf."""
        return _mask(
            self.positions[:, None], torch.arange(len(self.blocks) * BLOCK, device=self.positions.device), window
        )


@dataclass(slots=True)
class Line:
    """One forward's tokens and where their keys and values go."""

    pool: BlockPool
    ids: Tensor
    """`[1, rows]`, padded"""
    positions: Tensor
    """`[1, rows]`"""
    tokens: int
    """rows that are not padding"""
    singles: int
    """the first that many tokens are pieces of one token"""
    block: Tensor
    """`[tokens]`: the block each token's key goes to"""
    offset: Tensor
    """`[tokens]`: and the place in it"""
    pieces: list[_Piece]
    held: Tensor
    """all blocks of the singles' sessions, session by session, in the order of the text"""
    owner: Tensor
    """like `held`: which single"""
    base: Tensor
    """like `held`: position of the block's first token"""
    place: Tensor
    """like `held`: owner * most + index of the block in its session"""
    most: int
    """blocks of the longest single's session"""
    distinct: bool
    """no two singles are of one session (they are when a session is computed again)"""
    masks: dict[Any, Any] = field(default_factory=dict)
    """by sliding window; made once, used by every layer"""

    @classmethod
    def build(cls, batch: Sequence[tuple[Session, int, int]], rows: int, pool: BlockPool) -> Line:
        """A line from pieces (session, start, end), those of one token first; blocks are already reserved."""
        device = pool.device
        ids: list[int] = []
        positions: list[int] = []
        block: list[int] = []
        for session, start, end in batch:
            ids += session.ids[start:end]
            positions += range(start, end)
            block += [session.blocks[p // BLOCK] for p in range(start, end)]
        tokens = len(ids)
        pad = [0] * (rows - tokens)
        at = torch.tensor(positions + pad, device=device)
        singles = sum(end - start == 1 for _, start, end in batch)
        pieces, offset = [], singles
        for session, start, end in batch[singles:]:
            blocks = torch.tensor(session.blocks[: -(-end // BLOCK)], device=device)
            pieces.append(_Piece(offset, at[offset : offset + end - start], blocks))
            offset += end - start
        return cls(
            pool=pool,
            ids=torch.tensor([ids + pad], device=device),
            positions=at[None],
            tokens=tokens,
            singles=singles,
            block=torch.tensor(block, device=device),
            offset=at[:tokens] % BLOCK,
            pieces=pieces,
            **_tables(batch[:singles], device),
        )

    def single_mask(self, window: int | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """For the singles: owner of each block met, which of those to keep (None: all), and the mask `[blocks, 1, 1, BLOCK]`.

        When the singles hold most of the pool, and each block has one owner, blocks are read where they lie; else they are gathered.
        """
        if window not in self.masks:
            inside = torch.arange(BLOCK, device=self.held.device)
            position = self.positions[0][self.owner][:, None]
            mask = _mask(position, self.base[:, None] + inside, window)
            mask.masked_fill_((self.base < 0)[:, None], -torch.inf)
            owner, keep = self.owner, None
            if self.distinct and MIN_BLOCKS <= self.pool.size < 2 * len(self.held):
                owner = torch.zeros(self.pool.size, dtype=torch.long, device=mask.device)
                owner[self.held] = self.owner
                whole = torch.full((self.pool.size, BLOCK), -torch.inf, device=mask.device)
                whole[self.held] = mask
                mask, keep = whole, self.held
            self.masks[window] = owner, keep, mask[:, None, None, :]
        return self.masks[window]


def _tables(singles: Sequence[tuple[Session, int, int]], device: torch.device) -> dict[str, Any]:
    """`held`, `owner`, `base`, `place`, `most` and `distinct` of a Line; padding has base -1 and changes nothing."""
    held: list[int] = []
    owner: list[int] = []
    base: list[int] = []
    counts = [-(-end // BLOCK) for _, _, end in singles]
    most = max(counts, default=1)
    place: list[int] = []
    for i, ((session, _, _), n) in enumerate(zip(singles, counts, strict=True)):
        held += session.blocks[:n]
        owner += [i] * n
        base += range(0, n * BLOCK, BLOCK)
        place += range(i * most, i * most + n)
    pad = max(0, MIN_BLOCKS - len(held)) if singles else 0
    table = [held + [0] * pad, owner + [0] * pad, base + [-1] * pad, place + [len(singles) * most] * pad]
    tensors = [torch.tensor(t, dtype=torch.long, device=device) for t in table]
    distinct = len({session.key for session, _, _ in singles}) == len(singles)
    return dict(zip(("held", "owner", "base", "place"), tensors, strict=True), most=most, distinct=distinct)


def _mask(position: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """0 where the key's position is at most `position` and within the sliding window, else -inf."""
    hidden = keys > position
    if window is not None:
        hidden = hidden | (keys <= position - window)
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def block_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    agentrl_line: Line,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: `query` `[1, heads, rows, dim]`, `key` and `value` `[1, kv_heads, rows, dim]`.

    Returns `[1, rows, heads, dim]`; rows of padding are zero.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("the local engine's attention has no soft cap and no sinks; this model needs them")
    line = agentrl_line
    keys, values = line.pool.layer(cast(int, module.layer_idx), key, value)
    tokens = line.tokens
    keys[line.block, :, line.offset] = key[0, :, :tokens].transpose(0, 1)
    values[line.block, :, line.offset] = value[0, :, :tokens].transpose(0, 1)
    heads, rows, dim = query.shape[1:]
    scale = dim**-0.5 if scaling is None else scaling
    out = query.new_zeros(rows, heads, value.shape[-1])
    if line.singles:
        q = query[0, :, : line.singles].transpose(0, 1).reshape(line.singles, keys.shape[1], -1, dim)
        out[: line.singles] = _singles(line, q, keys, values, scale, sliding_window).flatten(1, 2)
    for piece in line.pieces:
        end = piece.offset + len(piece.positions)
        out[piece.offset : end] = _piece(piece, query[0, :, piece.offset : end], keys, values, scale, sliding_window)
    return out[None], None


def _singles(line: Line, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """`q` `[singles, kv_heads, group, dim]` -> the same shape."""
    owner, keep, mask = line.single_mask(window)
    if keep is None:
        keys, values = keys.index_select(0, line.held), values.index_select(0, line.held)
    else:
        keys, values = keys[: line.pool.size], values[: line.pool.size]
    scores = torch.matmul(q.index_select(0, owner), keys.transpose(2, 3)).float().mul_(scale).add_(mask)
    peaks = scores.amax(-1)
    table = torch.full((line.singles * line.most + 1, *peaks.shape[1:]), -torch.inf, device=q.device)
    table.index_copy_(0, line.place, peaks if keep is None else peaks.index_select(0, keep))
    peak = table[:-1].view(line.singles, line.most, *peaks.shape[1:]).amax(1)
    weights = scores.sub_(peak.index_select(0, owner).unsqueeze(-1)).exp_()
    total, part = weights.sum(-1), torch.matmul(weights.to(values.dtype), values).float()
    if keep is not None:
        total, part = total.index_select(0, keep), part.index_select(0, keep)
    totals = torch.zeros_like(peak).index_add_(0, line.owner, total)
    parts = part.new_zeros(line.singles, *part.shape[1:]).index_add_(0, line.owner, part)
    return parts.div_(totals.unsqueeze(-1)).to(q.dtype)


def _piece(piece: _Piece, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """`query` `[heads, tokens, dim]` of one piece -> `[tokens, heads, dim]`."""
    heads, tokens, dim = query.shape
    k, v = (t.index_select(0, piece.blocks).transpose(0, 1).flatten(1, 2) for t in (keys, values))
    q = query.reshape(k.shape[0], -1, dim)
    scores = torch.matmul(q, k.transpose(1, 2)).float().mul_(scale)
    scores.view(heads, tokens, -1).add_(piece.mask(window))
    out = torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)
    return out.view(heads, tokens, -1).transpose(0, 1)
