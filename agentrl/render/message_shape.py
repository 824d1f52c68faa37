"""The shape of messages: everything except their texts. A delta is proven once for all messages of one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.core.message_images import is_image
from agentrl.types import Message

_CONTENT_KEYS = ("content", "text", "output")
"""keys whose text must appear in the rendering"""
_PART_LISTS = ("content", "tool_calls")
"""keys of a message whose items have a `type` of their own"""
_TEXT, _LIST, _IMAGE = object(), object(), object()
Shape = tuple[Any, ...]
ChangeText = Callable[[str], str]


def shape_of(messages: Sequence[Message]) -> tuple[Shape, list[str], tuple[int, ...]]:
    """The shape of messages, their texts in order, and the indices of the texts that the rendering must contain.

    A message's own role and type, and the type of a part or call, belong to the shape. Keys of these names elsewhere hold texts.
    """
    texts: list[str] = []
    contents: list[int] = []
    shapes = []
    for message in messages:
        shape = []
        for key, value in message.items():
            if type(value) is not str or key in ("role", "type"):
                shape.append((key, _value_shape(value, key, texts, contents)))
                continue
            if key in _CONTENT_KEYS:  # the usual case of `_walk`
                contents.append(len(texts))
            texts.append(value)
            shape.append((key, _TEXT))
        shapes.append(tuple(shape))
    return tuple(shapes), texts, tuple(contents)


def _value_shape(value: Any, key: str, texts: list[str], contents: list[int]) -> Any:
    """The shape of what a message has under a key."""
    if key not in _PART_LISTS or not isinstance(value, (list, tuple)):
        return _walk(value, key, ("role", "type") if isinstance(value, str) else (), texts, contents)
    return (
        _LIST,
        *(
            _IMAGE if key == "content" and is_image(item) else _walk(item, key, ("type",), texts, contents)
            for item in value
        ),
    )


def _walk(value: Any, key: str, structure: tuple[str, ...], texts: list[str], contents: list[int]) -> Any:
    """The shape of a value, whose texts are added to `texts` unless their key belongs to the structure."""
    if isinstance(value, str):
        if key in structure:
            return value
        if key in _CONTENT_KEYS:
            contents.append(len(texts))
        texts.append(value)
        return _TEXT
    if isinstance(value, (dict, Mapping)):  # `dict` first: it is the faster test
        return tuple(
            (k, _walk(v, k, structure if isinstance(v, str) else (), texts, contents)) for k, v in value.items()
        )
    if isinstance(value, (list, tuple)):
        return (_LIST, *(_walk(v, key, (), texts, contents) for v in value))
    return type(value).__name__, repr(value)


def map_texts(value: Any, change: ChangeText, change_key: ChangeText | None = None) -> Any:
    """A copy of a value with every text changed, and every key by `change_key`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(k, change_key): map_texts(v, change, change_key) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(v, change, change_key) for v in value]
    return value


def map_message_texts(message: Message, change: ChangeText, change_key: ChangeText | None = None) -> Message:
    """A copy of a message with every text changed, except its role and type, the types of its parts and calls, and its images."""

    def item(value: Any, key: str) -> Any:
        if key == "content" and is_image(value):
            return value
        if not isinstance(value, Mapping):
            return map_texts(value, change, change_key)
        return {
            _changed(k, change_key): v if k == "type" and isinstance(v, str) else map_texts(v, change, change_key)
            for k, v in value.items()
        }

    changed: Message = {}
    for k, v in message.items():
        if k in ("role", "type") and isinstance(v, str):
            changed[k] = v
        elif k in _PART_LISTS and isinstance(v, (list, tuple)):
            changed[k] = [item(part, k) for part in v]
        else:
            changed[_changed(k, change_key)] = map_texts(v, change, change_key)
    return changed


def _changed(key: Any, change_key: ChangeText | None) -> Any:
    return change_key(key) if change_key is not None and isinstance(key, str) else key


def message_texts_and_keys(message: Message) -> list[str]:
    """Every text and every key of a message."""
    return _collected(map_message_texts, message)


def texts_and_keys(value: Any) -> list[str]:
    """Every text and every key of a value."""
    return _collected(map_texts, value)


def _collected(map_function: Callable[[Any, ChangeText, ChangeText], Any], value: Any) -> list[str]:
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    map_function(value, collect, collect)
    return texts
