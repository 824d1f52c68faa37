"""Keeps what tools and users wrote plain text when a whole conversation is rendered: it cannot become a control token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.render.message_shape import map_texts, texts_and_keys
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Message


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
        allowed = [self._assistant_tokens if m["role"] == "assistant" else frozenset() for m in messages]
        if self.off or not (any(map(self._has_token, messages, allowed)) or self._has_token(tools, frozenset())):
            return list(messages), list(tools), 0
        base = self._tokenizer.unused_base(texts_and_keys((messages, tools)))
        escape = partial(self._tokenizer.escape, base=base)
        escaped = [map_texts(m, partial(escape, keep=keep), escape) for m, keep in zip(messages, allowed, strict=True)]
        return escaped, map_texts(list(tools), escape, escape), base

    def _has_token(self, value: Any, allowed: frozenset[str]) -> bool:
        """Whether a text holds an added token that is not allowed there."""
        return any(self._tokenizer.has_token(text, allowed) for text in texts_and_keys(value))
