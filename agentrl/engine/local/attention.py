"""Attention over blocks of keys and values for the tokens of many sessions. A token's result does not depend on the other tokens.

A forward has one flat batch of tokens: first the decode tokens (chunks of one token), then the prefill chunks, then padding. All decode tokens
attend to all blocks of their sessions in one batched product of fixed shape per block; the blocks' parts are then combined in the order of the
text (an online softmax with the true maximum). Each prefill chunk has a separate product. `kv_cache` explains why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from agentrl.engine.local.kv_cache import BLOCK, BlockPool, Chunk

NAME = "agentrl_blocks"
"""the name of this attention in transformers"""
MIN_BLOCKS = 8
"""Fewer decode blocks are padded: for a batch of one product the library could use another algorithm."""


@dataclass(slots=True)
class _PrefillChunk:
    """A chunk of more than one token."""

    offset: int
    """index of its first token in the batch"""
    positions: Tensor
    """`[tokens]`"""
    blocks: Tensor
    """blocks of its session, up to its last token"""

    def mask(self, window: int | None) -> Tensor:
        """`[tokens, blocks * BLOCK]`: 0 where a token attends, else -inf."""
        keys = torch.arange(len(self.blocks) * BLOCK, device=self.positions.device)
        return _mask(self.positions[:, None], keys, window)


@dataclass(slots=True, kw_only=True)
class Batch:
    """The tokens of one forward, and where their keys and values go."""

    pool: BlockPool
    ids: Tensor
    """`[1, rows]`, padded"""
    positions: Tensor
    """`[1, rows]`"""
    tokens: int
    """rows that are not padding"""
    decode_tokens: int
    """the first rows, each a chunk of one token"""
    block: Tensor
    """`[tokens]`: the block for each token's key and value"""
    offset: Tensor
    """`[tokens]`: the position in that block"""
    prefill_chunks: list[_PrefillChunk]
    block_table: Tensor
    """all blocks of the decode tokens' sessions, session by session, in the order of the text"""
    block_owner: Tensor
    """parallel to `block_table`: the decode token"""
    block_start: Tensor
    """parallel to `block_table`: position of the block's first token"""
    block_slot: Tensor
    """parallel to `block_table`: owner * max_blocks + index of the block in its session"""
    max_blocks: int
    """blocks of the longest decode token's session"""
    distinct: bool
    """all decode tokens belong to different sessions (not so when a session is computed again)"""
    masks: dict[Any, Any] = field(default_factory=dict)
    """masks by sliding window, computed once for all layers"""

    @classmethod
    def build(cls, chunks: Sequence[Chunk], rows: int, pool: BlockPool) -> Batch:
        """A batch of chunks, those of one token first. Their blocks must be allocated."""
        device = pool.device
        ids: list[int] = []
        positions: list[int] = []
        block: list[int] = []
        for session, start, end in chunks:
            ids += session.ids[start:end]
            positions += range(start, end)
            block += [session.blocks[p // BLOCK] for p in range(start, end)]
        tokens = len(ids)
        padding = [0] * (rows - tokens)
        padded_positions = torch.tensor(positions + padding, device=device)
        decode_tokens = sum(chunk.tokens == 1 for chunk in chunks)
        prefill_chunks, offset = [], decode_tokens
        for chunk in chunks[decode_tokens:]:
            blocks = torch.tensor(chunk.session.blocks[: -(-chunk.end // BLOCK)], device=device)
            prefill_chunks.append(_PrefillChunk(offset, padded_positions[offset : offset + chunk.tokens], blocks))
            offset += chunk.tokens
        return cls(
            pool=pool,
            ids=torch.tensor([ids + padding], device=device),
            positions=padded_positions[None],
            tokens=tokens,
            decode_tokens=decode_tokens,
            block=torch.tensor(block, device=device),
            offset=padded_positions[:tokens] % BLOCK,
            prefill_chunks=prefill_chunks,
            **_decode_blocks(chunks[:decode_tokens], device),
        )

    def decode_mask(self, window: int | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """For the decode tokens: the owner of each block read, which of those blocks to keep (None: all), and the mask `[blocks, 1, 1, BLOCK]`.

        When the decode tokens hold most of the pool, and each block has one owner, the whole pool is read in place; else blocks are gathered.
        """
        if window not in self.masks:
            inside = torch.arange(BLOCK, device=self.block_table.device)
            position = self.positions[0][self.block_owner][:, None]
            mask = _mask(position, self.block_start[:, None] + inside, window)
            mask.masked_fill_((self.block_start < 0)[:, None], -torch.inf)
            owner, keep = self.block_owner, None
            if self.distinct and MIN_BLOCKS <= self.pool.size < 2 * len(self.block_table):
                owner = torch.zeros(self.pool.size, dtype=torch.long, device=mask.device)
                owner[self.block_table] = self.block_owner
                whole = torch.full((self.pool.size, BLOCK), -torch.inf, device=mask.device)
                whole[self.block_table] = mask
                mask, keep = whole, self.block_table
            self.masks[window] = owner, keep, mask[:, None, None, :]
        return self.masks[window]


def _decode_blocks(chunks: Sequence[Chunk], device: torch.device) -> dict[str, Any]:
    """`block_table`, `block_owner`, `block_start`, `block_slot`, `max_blocks` and `distinct` of a Batch. Padding has start -1 and no effect."""
    table: list[int] = []
    owner: list[int] = []
    start: list[int] = []
    slot: list[int] = []
    counts = [-(-chunk.end // BLOCK) for chunk in chunks]
    max_blocks = max(counts, default=1)
    for i, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        table += chunk.session.blocks[:count]
        owner += [i] * count
        start += range(0, count * BLOCK, BLOCK)
        slot += range(i * max_blocks, i * max_blocks + count)
    padding = max(0, MIN_BLOCKS - len(table)) if chunks else 0
    columns = {
        "block_table": table + [0] * padding,
        "block_owner": owner + [0] * padding,
        "block_start": start + [-1] * padding,
        "block_slot": slot + [len(chunks) * max_blocks] * padding,
    }
    tensors = {name: torch.tensor(column, dtype=torch.long, device=device) for name, column in columns.items()}
    distinct = len({chunk.session.key for chunk in chunks}) == len(chunks)
    return {**tensors, "max_blocks": max_blocks, "distinct": distinct}


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
    agentrl_batch: Batch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: `query` `[1, heads, rows, dim]`, `key` and `value` `[1, kv_heads, rows, dim]`.

    Returns `[1, rows, heads, dim]`; rows of padding are zero.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            "the local engine's attention has no soft cap and no sinks, which this model needs; use --engine sglang"
        )
    batch = agentrl_batch
    keys, values = batch.pool.layer(cast(int, module.layer_idx), key, value)
    tokens, decode_tokens = batch.tokens, batch.decode_tokens
    keys[batch.block, :, batch.offset] = key[0, :, :tokens].transpose(0, 1)
    values[batch.block, :, batch.offset] = value[0, :, :tokens].transpose(0, 1)
    heads, rows, dim = query.shape[1:]
    scale = dim**-0.5 if scaling is None else scaling
    out = query.new_zeros(rows, heads, value.shape[-1])
    if decode_tokens:
        q = query[0, :, :decode_tokens].transpose(0, 1).reshape(decode_tokens, keys.shape[1], -1, dim)
        out[:decode_tokens] = _decode(batch, q, keys, values, scale, sliding_window).flatten(1, 2)
    for chunk in batch.prefill_chunks:
        end = chunk.offset + len(chunk.positions)
        out[chunk.offset : end] = _prefill(chunk, query[0, :, chunk.offset : end], keys, values, scale, sliding_window)
    return out[None], None


def _decode(batch: Batch, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of the decode tokens; `q` `[decode_tokens, kv_heads, group, dim]`, and so is the result."""
    owner, keep, mask = batch.decode_mask(window)
    if keep is None:
        keys, values = keys.index_select(0, batch.block_table), values.index_select(0, batch.block_table)
    else:
        keys, values = keys[: batch.pool.size], values[: batch.pool.size]
    scores = torch.matmul(q.index_select(0, owner), keys.transpose(2, 3)).float().mul_(scale).add_(mask)
    block_max = scores.detach().amax(-1)
    slots = torch.full((batch.decode_tokens * batch.max_blocks + 1, *block_max.shape[1:]), -torch.inf, device=q.device)
    slots.index_copy_(0, batch.block_slot, block_max if keep is None else block_max.index_select(0, keep))
    token_max = slots[:-1].view(batch.decode_tokens, batch.max_blocks, *block_max.shape[1:]).amax(1)
    weights = scores.sub_(token_max.index_select(0, owner).unsqueeze(-1)).exp_()
    total, part = weights.sum(-1), torch.matmul(weights.to(values.dtype), values).float()
    if keep is not None:
        total, part = total.index_select(0, keep), part.index_select(0, keep)
    totals = torch.zeros_like(token_max).index_add_(0, batch.block_owner, total)
    parts = part.new_zeros(batch.decode_tokens, *part.shape[1:]).index_add_(0, batch.block_owner, part)
    return (parts / totals.unsqueeze(-1)).to(q.dtype)


def _prefill(
    chunk: _PrefillChunk, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention of one prefill chunk; `query` `[heads, tokens, dim]` -> `[tokens, heads, dim]`."""
    heads, tokens, dim = query.shape
    k, v = (cache.index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2) for cache in (keys, values))
    q = query.reshape(k.shape[0], -1, dim)
    scores = torch.matmul(q, k.transpose(1, 2)).float().mul_(scale)
    scores.view(heads, tokens, -1).add_(chunk.mask(window))
    out = torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)
    return out.view(heads, tokens, -1).transpose(0, 1)
