"""When two messages are the same, although a client wrote one of them again.

Ignored: the order of keys and the white space of arguments, the ids of calls, reasoning, cache markers, white space round a text, names of
tool messages. Compared: the role, the text, the names and arguments of calls, images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from agentrl.core.message_images import Image, is_image
from agentrl.render.formats.block_format import without_thinking
from agentrl.types import Message

NO_MESSAGES = bytes(32)
"""`path_key` of a conversation before its first message"""
_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


def message_key(message: Message) -> bytes:
    """A key that is equal for messages that are the same.

    Example:
        >>> a = {"role": "assistant", "content": " Hi ", "reasoning_content": "greet"}
        >>> message_key(a) == message_key({"content": "Hi", "role": "assistant"})
        True
    """
    role, content = message["role"], _content(message.get("content"))
    if role == "assistant" and isinstance(content, str) and "think>" in content:
        content = without_thinking(content).strip()
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()]
    return hashlib.blake2b(_json([role, content, calls]), digest_size=16).digest()


def path_key(before: bytes, message: Message, key: bytes, number: int) -> bytes:
    """The key of a conversation: equal for the same messages in the same order.

    Args:
        before: that of the messages before the last one; `NO_MESSAGES` if there are none.
        message: the last one.
        key: its `message_key`.
        number: messages before it.
    """
    shown, system = before[:16], before[16:]
    if message["role"] == "system":
        return shown + hashlib.blake2b(b"%b%b%d" % (system, key, number), digest_size=16).digest()
    return hashlib.blake2b(shown + key, digest_size=16).digest() + system


def path_keys(messages: Iterable[Message], before: Sequence[bytes] = ()) -> list[bytes]:
    """The key of the conversation up to each of the messages, which follow those with the keys `before`."""
    paths, path = [], before[-1] if before else NO_MESSAGES
    for number, message in enumerate(messages, len(before)):
        path = path_key(path, message, message_key(message), number)
        paths.append(path)
    return paths


def shown_key(path: bytes) -> bytes:
    """The key of a conversation without its system messages."""
    return path[:16]


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """A key that is equal for equal tools in the same order."""
    return hashlib.blake2b(_json(list(tools)), digest_size=16).digest() if tools else b""


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return (content or "").strip()
    return [_part(p) for p in content]


def _part(part: Mapping[str, Any]) -> Any:
    if is_image(part):
        image = part.get("image")
        return ["image", image.sha256 if isinstance(image, Image) else repr(part)]
    return str(part.get("text", "")).strip()


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_SORTED)
    except TypeError:  # integers over 64 bits, deep nesting
        return repr(value).encode("utf-8", "surrogatepass")
