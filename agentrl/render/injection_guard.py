"""Keeping what tools and users wrote plain text when a whole conversation is rendered (design §5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.core.message_images import is_image
from agentrl.render.tokenizer import Tokenizer
from agentrl.types import Message

_STRUCTURE = ("role", "type")


class Shield:
    """Shields every text of a conversation: contents, names, ids, tools' schemas.

    In the assistant's own messages only headers and special tokens are shielded: the marks of its action format, and tags that are
    added tokens but not special (`<think>`, `<tool_call>`), stay what they were when they were sampled; but text that merely looks like
    `<|im_end|>` cannot become one.
    """

    def __init__(
        self, tokenizer: Tokenizer, raw: bool, *, own: Iterable[str] = (), headers: frozenset[str] = frozenset()
    ) -> None:
        """`own`: the marks of the action format; `headers`: tokens that say who speaks."""
        self.raw = raw
        self._tokenizer = tokenizer
        self._own = (frozenset(tokenizer.added) - tokenizer.controls - headers) | set(own)

    def texts(self, contents: Sequence[str]) -> tuple[list[str], int]:
        """Shield plain texts."""
        return (list(contents), 0) if self.raw else self._tokenizer.shield(contents)

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Any], int]:
        """Messages and tools with their texts shielded, and the base to unshield with (0: nothing was)."""
        found: list[str] = []
        if not self.raw:
            for m in messages:
                _texts(m, self._spared(m), self._tokenizer, found)
            _texts(tools, frozenset(), self._tokenizer, found)
        if not found:
            return list(messages), list(tools), 0
        everything: list[str] = []
        _all_texts((messages, tools), everything)
        base = self._tokenizer.free_base(everything)
        return (
            [self._swap(m, self._spared(m), base) for m in messages],
            self._swap(list(tools), frozenset(), base),
            base,
        )

    def _spared(self, message: Message) -> frozenset[str]:
        return self._own if message["role"] == "assistant" else frozenset()

    def _swap(self, value: Any, spared: frozenset[str], base: int, key: str = "") -> Any:
        if isinstance(value, str):
            return value if key in _STRUCTURE else self._tokenizer.shielded(value, base, spared)
        if is_image(value):
            return value
        if isinstance(value, Mapping):
            return {self._tokenizer.shielded(k, base): self._swap(v, spared, base, k) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._swap(v, spared, base, key) for v in value]
        return value


def _texts(value: Any, spared: frozenset[str], tokenizer: Tokenizer, found: list[str]) -> None:
    """The texts that hold an added token which is not spared."""
    texts: list[str] = []
    _all_texts(value, texts)
    found += [t for t in texts if any(m.group() not in spared for m in tokenizer.pattern.finditer(t))]


def _all_texts(value: Any, out: list[str], key: str = "") -> None:
    if isinstance(value, str):
        if key not in _STRUCTURE:
            out.append(value)
    elif is_image(value):
        return
    elif isinstance(value, Mapping):
        for k, v in value.items():
            if isinstance(k, str):
                out.append(k)
            _all_texts(v, out, k)
    elif isinstance(value, (list, tuple)):
        for v in value:
            _all_texts(v, out, key)
