"""Keeps what tools and users wrote plain text when a whole conversation is rendered: it cannot become a control token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.render.message_shape import map_message_texts, map_texts, message_texts_and_keys, texts_and_keys
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Message

_NONE: frozenset[str] = frozenset()
_THINKING = frozenset({"<think>", "</think>"})


class InjectionGuard:
    """Escapes added tokens in every text of a conversation: contents, names, ids, tools' schemas.

    In the assistant's messages only headers and special tokens are escaped. The markers of its action format, and tags that are added but
    not special tokens (`<think>`, `<tool_call>`), stay the tokens as which they were sampled; text that merely looks like `<|im_end|>`
    cannot become one.
    """

    def __init__(self, tokenizer: Tokenizer, *, off: bool, markers: Iterable[str], headers: frozenset[str]) -> None:
        """`off`: escape nothing; `markers`: of the action format; `headers`: tokens that name the speaker."""
        self.off = off
        self._tokenizer = tokenizer
        self._assistant_tokens = (frozenset(tokenizer.added) - tokenizer.controls - headers) | set(markers)

    def texts(self, contents: Sequence[str]) -> tuple[list[str], int]:
        """The contents escaped, and the base to encode them with."""
        return (list(contents), 0) if self.off else self._tokenizer.escape_all(contents)

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Any], int]:
        """Messages and tools with their texts escaped, and the base to encode the rendering with (0: nothing was escaped)."""
        keep = [self._assistant_tokens if m["role"] == "assistant" else _NONE for m in messages]
        if self.off or not (any(map(self._has_token, messages, keep)) or self._tools_have_token(tools)):
            return list(messages), list(tools), 0
        base = self._tokenizer.unused_base(texts_and_keys((messages, tools)))
        escape = partial(self._tokenizer.escape, base=base)
        escaped = [map_message_texts(m, partial(escape, keep=k), escape) for m, k in zip(messages, keep, strict=True)]
        return escaped, map_texts(list(tools), escape, escape), base

    def demonstration(
        self, history: Sequence[Message], turn: Message, tools: Sequence[Mapping[str, Any]], ends: Iterable[str]
    ) -> tuple[list[Message], Message, list[Any], int]:
        """History, an assistant's turn that was not sampled, and tools, with their texts escaped, and the base.

        In the turn's content and thinking, the markers of the action format and the tags of thinking stay tokens, but not `ends`. In
        the arguments of its calls everything is text.
        """
        if self.off:
            return list(history), turn, list(tools), 0
        base = self._tokenizer.unused_base(texts_and_keys((history, turn, tools)))
        escape = partial(self._tokenizer.escape, base=base)
        kept = (self._assistant_tokens | _THINKING) - set(ends)
        escaped = [
            map_message_texts(
                m, partial(escape, keep=self._assistant_tokens if m["role"] == "assistant" else _NONE), escape
            )
            for m in history
        ]
        written = map_message_texts({k: v for k, v in turn.items() if k != "tool_calls"}, partial(escape, keep=kept))
        if turn.get("tool_calls"):
            written["tool_calls"] = [map_texts(call, escape, escape) for call in turn["tool_calls"]]
        return escaped, written, map_texts(list(tools), escape, escape), base

    def _has_token(self, message: Message, allowed: frozenset[str]) -> bool:
        """Whether a text of a message holds an added token that is not allowed there."""
        return any(self._tokenizer.has_token(text, allowed) for text in message_texts_and_keys(message))

    def _tools_have_token(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        return any(map(self._tokenizer.has_token, texts_and_keys(tools)))
