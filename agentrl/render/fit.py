"""Cutting an observation that does not fit: at a token boundary, never inside a character, never in the scaffold."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.render.base import Delta
from agentrl.render.template import Renderer
from agentrl.types import Message

_ROUNDS = 8


def fit(
    renderer: Renderer, messages: Sequence[Message], sampled: Sequence[int], room: int
) -> tuple[Delta | None, list[Message], int]:
    """The delta for `messages`, of at most `room` tokens.

    The longest contents lose their ends until it fits. Returns the delta (None: not even the scaffold fits), the messages as they went
    in, and how many tokens were cut.
    """
    kept = list(messages)
    delta = renderer.delta(kept, sampled)
    whole = len(delta)
    for _ in range(_ROUNDS):
        if len(delta) <= room:
            return delta, kept, whole - len(delta)
        texts = [renderer.tokenizer.encode_plain(m["content"]) if isinstance(m["content"], str) else [] for m in kept]
        longest = max(range(len(kept)), key=lambda i: len(texts[i]))
        if not texts[longest]:
            break
        keep = max(0, len(texts[longest]) - max(1, len(delta) - room))
        kept[longest] = {**kept[longest], "content": whole_characters(renderer, texts[longest][:keep])}
        delta = renderer.delta(kept, sampled)
    return (delta, kept, whole - len(delta)) if len(delta) <= room else (None, kept, 0)


def whole_characters(renderer: Renderer, ids: list[int]) -> str:
    """The text of ids less a character that was cut in the middle."""
    for _ in range(4):
        text = renderer.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            return text
        ids = ids[:-1]
    return renderer.tokenizer.decode(ids)
