"""The shape of messages: everything about them but their texts. Messages of one shape are proven once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.core.message_images import is_image
from agentrl.types import Message

_STRUCTURE = ("role", "type")
"""keys whose text belongs to the shape"""
_SHOWN = ("content", "text", "output")
"""keys whose text must appear in what the template renders"""
Shape = tuple[Any, ...]


def shape_of(messages: Sequence[Message]) -> tuple[Shape, list[str], tuple[int, ...]]:
    """The shape, the texts in order, and which of them must appear."""
    texts: list[str] = []
    shown: list[int] = []

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str):
            if key in _STRUCTURE:
                return value
            if key in _SHOWN:
                shown.append(len(texts))
            texts.append(value)
            return _TEXT
        if is_image(value):
            return _IMAGE
        if isinstance(value, (dict, Mapping)):
            return tuple((k, walk(v, k)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return (_LIST, *(walk(v, key) for v in value))
        return type(value).__name__, repr(value)

    return tuple(walk(m, "") for m in messages), texts, tuple(shown)


_TEXT, _LIST, _IMAGE = object(), object(), object()


def with_texts(messages: Sequence[Message], make: Callable[[int, str], str]) -> list[Message]:
    """The messages with text number i replaced by `make(i, text)`."""
    count = iter(range(1 << 30))

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str):
            return value if key in _STRUCTURE else make(next(count), value)
        if is_image(value):
            return value
        if isinstance(value, (dict, Mapping)):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(v, key) for v in value]
        return value

    return [walk(m, "") for m in messages]
