"""Cutting an observation that does not fit: at a token boundary, never inside a character, never in the scaffold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.render.base import Delta
from agentrl.render.template import Renderer
from agentrl.types import Message

_ROUNDS = 8


def fit(
    renderer: Renderer,
    messages: Sequence[Message],
    sampled: Sequence[int],
    room: int,
    *,
    history: Sequence[Message] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Delta | None, list[Message], int]:
    """The delta for `messages`, of at most `room` tokens (`history` and `tools` as in `Renderer.delta`).

    The longest contents lose their ends until it fits. Returns the delta (None: not even the scaffold fits), the messages as they went
    in, and how many tokens were cut. A delta that opens a new segment is returned as it is: what fits then is known once the new
    context is rendered (`fit_prompt`).
    """
    kept = list(messages)
    delta = renderer.delta(kept, sampled, history=history, tools=tools)
    whole = len(delta)
    for _ in range(_ROUNDS):
        if len(delta) <= room or delta.new_segment is not None:
            break
        shorter = shortened(renderer, kept, len(delta) - room)
        if shorter is None:
            break
        kept = shorter
        delta = renderer.delta(kept, sampled, history=history, tools=tools)
    return (delta, kept, whole - len(delta)) if len(delta) <= room else (None, kept, 0)


def fit_prompt(
    renderer: Renderer,
    history: Sequence[Message],
    messages: Sequence[Message],
    room: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[tuple[int, ...] | None, list[Message], int]:
    """The ids of a new context of at most `room` tokens: history whole, `messages` cut as in `fit`."""
    kept = list(messages)
    ((_, ids),) = renderer.prompt([*history, *kept], tools)
    whole = len(ids)
    for _ in range(_ROUNDS):
        if len(ids) <= room:
            break
        shorter = shortened(renderer, kept, len(ids) - room)
        if shorter is None:
            break
        kept = shorter
        ((_, ids),) = renderer.prompt([*history, *kept], tools)
    return (ids, kept, whole - len(ids)) if len(ids) <= room else (None, kept, 0)


def shortened(renderer: Renderer, messages: Sequence[Message], by: int) -> list[Message] | None:
    """The messages with the longest content `by` tokens shorter; None if there is nothing left to cut."""
    texts = [
        renderer.tokenizer.encode_plain(m["content"]) if isinstance(m.get("content"), str) else [] for m in messages
    ]
    longest = max(range(len(texts)), key=lambda i: len(texts[i]), default=-1)
    if longest < 0 or not texts[longest]:
        return None
    keep = max(0, len(texts[longest]) - max(1, by))
    kept = list(messages)
    kept[longest] = {**kept[longest], "content": whole_characters(renderer, texts[longest][:keep])}
    return kept


def whole_characters(renderer: Renderer, ids: list[int]) -> str:
    """The text of ids less a character that was cut in the middle."""
    for _ in range(4):
        text = renderer.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            return text
        ids = ids[:-1]
    return renderer.tokenizer.decode(ids)
