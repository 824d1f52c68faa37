"""The shape of messages: everything except their texts. A delta is proven once for all messages of one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.core.message_images import is_image
from agentrl.types import Message

STRUCTURE_KEYS = ("role", "type")
"""keys whose text belongs to the shape"""
_CONTENT_KEYS = ("content", "text", "output")
"""keys whose text must appear in the rendering"""
_TEXT, _LIST, _IMAGE = object(), object(), object()
Shape = tuple[Any, ...]
ChangeText = Callable[[str], str]


def shape_of(messages: Sequence[Message]) -> tuple[Shape, list[str], tuple[int, ...]]:
    """The shape of messages, their texts in order, and the indices of the texts that the rendering must contain."""
    texts: list[str] = []
    contents: list[int] = []

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str):
            if key in STRUCTURE_KEYS:
                return value
            if key in _CONTENT_KEYS:
                contents.append(len(texts))
            texts.append(value)
            return _TEXT
        if is_image(value):
            return _IMAGE
        if isinstance(value, (dict, Mapping)):  # `dict` first: it is the faster test
            return tuple((k, walk(v, k)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return (_LIST, *(walk(v, key) for v in value))
        return type(value).__name__, repr(value)

    return tuple(walk(m, "") for m in messages), texts, tuple(contents)


def map_texts(value: Any, change: ChangeText, change_key: ChangeText | None = None, key: str = "") -> Any:
    """A copy of messages or tools with every text changed, and every key by `change_key`. Roles, types and images remain."""
    if isinstance(value, str):
        return value if key in STRUCTURE_KEYS else change(value)
    if is_image(value):
        return value
    if isinstance(value, Mapping):
        return {
            change_key(k) if change_key is not None and isinstance(k, str) else k: map_texts(v, change, change_key, k)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [map_texts(v, change, change_key, key) for v in value]
    return value


def texts_and_keys(value: Any) -> list[str]:
    """Every text and every key of messages or tools."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    map_texts(value, collect, collect)
    return texts
