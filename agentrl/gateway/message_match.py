"""When two messages are the same, although a client wrote one of them again.

Ignored: the order of keys and the white space of arguments, the ids of calls, reasoning, cache markers, white space round a text, names of
tool messages. Compared: the role, the text, the names and arguments of calls, images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentrl.core.message_images import Image, is_image
from agentrl.render.formats.block_format import without_thinking
from agentrl.types import Message

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
