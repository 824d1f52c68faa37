"""What follows a turn in the context, and cutting what does not fit: at a token boundary, never inside a character, never in the scaffold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.message_images import PlacedImage
from agentrl.render.base import Delta, Pieces
from agentrl.render.renderer import Renderer
from agentrl.types import Message, Provenance

LONG = 1 << 16
"""characters; about 20 ms"""
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Next:
    """How the context goes on after a turn."""

    pieces: Pieces
    images: list[PlacedImage]
    """where they stand in the pieces"""
    opens: str | None
    """why the pieces are the beginning of a new segment; None: they follow the context"""
    before: list[Message]
    """the conversation up to the policy's turn"""
    kept: list[Message]
    """the messages after it, as they went in"""
    cut: int
    """tokens of them that did not fit"""

    @property
    def conversation(self) -> list[Message]:
        """All of it."""
        return [*self.before, *self.kept]


def follow(
    renderer: Renderer,
    history: Sequence[Message],
    said: Message,
    messages: Sequence[Message],
    sampled: Sequence[int],
    *,
    room: int,
    room_anew: int,
    tools: Sequence[Mapping[str, Any]],
) -> Next | None:
    """After the policy `said` something (ending in the ids `sampled`) and `messages` answered it. None: no room for them.

    `room`: tokens that may follow the context; `room_anew`: most tokens of a new segment.
    """
    delta, kept, cut = fit(renderer, messages, sampled, room, history=history, tools=tools)
    if delta is None:
        return None
    if delta.new_segment is not None:
        return anew(renderer, [*history, said], messages, delta.new_segment, room_anew, tools)
    return Next(delta.pieces, renderer.placed(delta.pieces, kept), None, [*history, said], kept, cut)


def anew(
    renderer: Renderer,
    before: Sequence[Message],
    messages: Sequence[Message],
    reason: str,
    room: int,
    tools: Sequence[Mapping[str, Any]],
) -> Next | None:
    """A new segment that begins with a conversation, of which `messages` may be cut. None: no room for it."""
    ids, kept, cut = fit_prompt(renderer, before, messages, room, tools)
    if ids is None:
        return None
    pieces = ((Provenance.PROMPT, ids),)
    return Next(pieces, renderer.placed(pieces, [*before, *kept]), reason, list(before), kept, cut)


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
    texts = {place: renderer.tokenizer.encode_plain(text) for place, text in _texts(messages)}
    longest = max(texts, key=lambda place: len(texts[place]), default=None)
    if longest is None or not texts[longest]:
        return None
    keep = max(0, len(texts[longest]) - max(1, by))
    text = whole_characters(renderer, texts[longest][:keep])
    number, part = longest
    kept = list(messages)
    content: Any = text
    if part is not None:
        content = list(kept[number]["content"])
        content[part] = {**content[part], "text": text}
    kept[number] = {**kept[number], "content": content}
    return kept


def is_long(messages: Sequence[Message]) -> bool:
    """So much text that rendering it takes longer than an event loop may stand still."""
    return sum(len(text) for _, text in _texts(messages)) > LONG


def _texts(messages: Sequence[Message]) -> Iterator[tuple[tuple[int, int | None], str]]:
    """Every text of the contents, by its message and part."""
    for i, m in enumerate(messages):
        if isinstance(m.get("content"), str):
            yield (i, None), m["content"]
        elif isinstance(m.get("content"), (list, tuple)):
            yield from (((i, n), p["text"]) for n, p in enumerate(m["content"]) if isinstance(p.get("text"), str))


def whole_characters(renderer: Renderer, ids: list[int]) -> str:
    """The text of ids less a character that was cut in the middle."""
    for _ in range(4):
        text = renderer.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            return text
        ids = ids[:-1]
    return renderer.tokenizer.decode(ids)
