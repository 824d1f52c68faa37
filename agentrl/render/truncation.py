"""The context after a turn, with contents truncated to what fits: at a token boundary, never inside a character or the template's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.core.message_images import PlacedImage
from agentrl.render.base import Delta, Pieces
from agentrl.render.renderer import Renderer
from agentrl.types import Message, Provenance

LONG_TEXT = 1 << 16
"""characters; rendering them takes about 20 ms"""
_MAX_ROUNDS = 8
Rendered = TypeVar("Rendered", bound=Sized)
Finish = Callable[[Sequence[Message]], list[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextContext:
    """How the context continues after a turn."""

    pieces: Pieces
    images: list[PlacedImage]
    """their positions in the pieces"""
    new_segment: str | None
    """why the pieces begin a new segment; None: they continue the context"""
    messages: list[Message]
    """the messages after the policy's turn, truncated"""
    cut_tokens: int
    """tokens of the messages that did not fit"""


def continue_context(
    renderer: Renderer,
    history: Sequence[Message],
    turn: Message,
    messages: Sequence[Message],
    sampled: Sequence[int],
    *,
    max_tokens: int,
    max_segment_tokens: int,
    tools: Sequence[Mapping[str, Any]],
    finish: Finish = list,
) -> NextContext | None:
    """The context after the policy's `turn` (whose ids end with `sampled`) and the `messages` that answer it. None: they do not fit.

    `max_tokens` may be appended to the context; a new segment may have `max_segment_tokens`. `finish` adds what is not
    truncated to the messages before they are rendered.
    """
    delta, kept, cut = truncate_delta(
        renderer, messages, sampled, max_tokens, history=history, tools=tools, finish=finish
    )
    if delta is None:
        return None
    if delta.new_segment is not None:
        return open_segment(renderer, [*history, turn], messages, delta.new_segment, max_segment_tokens, tools, finish)
    return NextContext(
        pieces=delta.pieces,
        images=renderer.placed(delta.pieces, finish(kept)),
        new_segment=None,
        messages=kept,
        cut_tokens=cut,
    )


def open_segment(
    renderer: Renderer,
    history: Sequence[Message],
    messages: Sequence[Message],
    reason: str,
    max_tokens: int,
    tools: Sequence[Mapping[str, Any]],
    finish: Finish = list,
) -> NextContext | None:
    """A new segment that begins with a conversation, of which `messages` may be truncated. None: it does not fit."""
    ids, kept, cut = truncate_prompt(renderer, history, messages, max_tokens, tools, finish)
    if ids is None:
        return None
    pieces = ((Provenance.PROMPT, ids),)
    return NextContext(
        pieces=pieces,
        images=renderer.placed(pieces, [*history, *finish(kept)]),
        new_segment=reason,
        messages=kept,
        cut_tokens=cut,
    )


def truncate_delta(
    renderer: Renderer,
    messages: Sequence[Message],
    sampled: Sequence[int],
    max_tokens: int,
    *,
    history: Sequence[Message] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    finish: Finish = list,
) -> tuple[Delta | None, list[Message], int]:
    """The delta for `messages`, truncated to at most `max_tokens` (other arguments as in `Renderer.delta`).

    Returns the delta (None: not even the template's text fits), the messages in it, and the number of tokens cut. A delta that opens a
    new segment is returned as it is: what fits is known once the new context is rendered (`truncate_prompt`).
    """
    return _truncate(
        renderer,
        messages,
        max_tokens,
        lambda kept: renderer.delta(finish(kept), sampled, history=history, tools=tools),
    )


def truncate_prompt(
    renderer: Renderer,
    history: Sequence[Message],
    messages: Sequence[Message],
    max_tokens: int,
    tools: Sequence[Mapping[str, Any]] = (),
    finish: Finish = list,
) -> tuple[tuple[int, ...] | None, list[Message], int]:
    """The ids of a new context of at most `max_tokens`: the history whole, `messages` truncated as in `truncate_delta`."""

    def render(kept: list[Message]) -> tuple[int, ...]:
        ((_, ids),) = renderer.prompt([*history, *finish(kept)], tools)
        return ids

    return _truncate(renderer, messages, max_tokens, render)


def _truncate(
    renderer: Renderer, messages: Sequence[Message], max_tokens: int, render: Callable[[list[Message]], Rendered]
) -> tuple[Rendered | None, list[Message], int]:
    """Shorten the longest content until the rendering fits. Returns it (None: it does not fit), the messages, and the tokens cut."""
    kept = list(messages)
    rendered = render(kept)
    length = full_length = len(rendered)
    for _ in range(_MAX_ROUNDS):
        if length <= max_tokens or not length:
            break
        shorter = _shorten_longest(renderer, kept, length - max_tokens)
        if shorter is None:
            break
        kept = shorter
        rendered = render(kept)
        length = len(rendered)
    return (rendered, kept, full_length - length) if length <= max_tokens else (None, kept, 0)


def _shorten_longest(renderer: Renderer, messages: Sequence[Message], tokens: int) -> list[Message] | None:
    """The messages with the longest content shortened by this many tokens, or None if nothing is left to cut."""
    contents = {place: renderer.tokenizer.encode_plain(text) for place, text in _texts(messages)}
    longest = max(contents, key=lambda place: len(contents[place]), default=None)
    if longest is None or not contents[longest]:
        return None
    ids = contents[longest]
    text = _decode_whole_characters(renderer, ids[: max(0, len(ids) - max(1, tokens))])
    number, part = longest
    shortened = list(messages)
    content: Any = text
    if part is not None:
        content = list(messages[number]["content"])
        content[part] = {**content[part], "text": text}
    shortened[number] = {**messages[number], "content": content}
    return shortened


def is_long(messages: Sequence[Message]) -> bool:
    """Whether rendering the messages takes longer than an event loop may be blocked."""
    contents = [m.get("content") for m in messages]
    lengths = [len(c) for c in contents if type(c) is str]
    if len(lengths) == len(contents):
        return sum(lengths) > LONG_TEXT
    return sum(len(text) for _, text in _texts(messages)) > LONG_TEXT


def _texts(messages: Sequence[Message]) -> Iterator[tuple[tuple[int, int | None], str]]:
    """Every text of the contents, by its message and part."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            yield (number, None), content
        elif isinstance(content, (list, tuple)):
            yield from (((number, i), p["text"]) for i, p in enumerate(content) if isinstance(p.get("text"), str))


def _decode_whole_characters(renderer: Renderer, ids: list[int]) -> str:
    """The text of ids without a last character of which bytes are missing."""
    for _ in range(4):
        text = renderer.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            return text
        ids = ids[:-1]
    return renderer.tokenizer.decode(ids)
