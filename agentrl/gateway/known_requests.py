"""What earlier requests of a session contained, in the normal form. A request repeats its whole conversation; only what is new is normalised.

Messages are known if they have the bytes that they had: equal JSON values with their keys in the same order, from the first message on. So is the
answer after them, if the client returns it as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from agentrl.core.message_images import image_parts
from agentrl.data.message_form import normal_messages, normal_tools
from agentrl.errors import DataError
from agentrl.gateway.message_match import path_keys
from agentrl.types import Message

_MAX_CONVERSATIONS = 4
"""conversations of a session that are kept: an agent and its sub-agents take turns"""
_MAX_ANSWERS = 64
"""answers of a session that are kept until a client returns them"""
_MAX_SHARED_BYTES = 1 << 18
"""of tools that requests share"""


class Conversation(NamedTuple):
    """Messages in the normal form. A message that is known is the object that it was, and so are those before it."""

    messages: list[Message]
    paths: list[bytes]
    """`path_key` up to each; empty if there are images, which are not loaded yet"""


class _Known(NamedTuple):
    raw: bytes
    """the messages as JSON, without the bracket that closes their list"""
    conversation: Conversation


class KnownRequests:
    """The conversations of a session's last requests, and the answers to them."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        """the newest last"""
        self._answers: dict[bytes, Message] = {}
        """in the normal form, by the bytes of the message that returns them; the newest last"""

    def add_answer(self, returned: Mapping[str, Any], message: Message) -> None:
        """Note what an answer is in the normal form if a client returns it as it was written."""
        raw = to_json(returned)
        self._answers[bytes(memoryview(raw))] = message  # orjson's bytes hold a buffer of 4 KiB
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def messages(self, given: Any) -> Conversation:
        """The messages of a request in the normal form, without keys that no template reads.

        Raises:
            DataError: they are not a conversation.
        """
        if not isinstance(given, list) or not given:
            return Conversation(list(normal_messages(given)), [])
        raw = _raw(given)
        known = max((k for k in self._known if _begins(raw, k.raw)), default=None, key=_length)
        messages, paths = ([], []) if known is None else (known.conversation.messages[:], known.conversation.paths[:])
        begin = len(messages)
        if begin < len(given) and (answer := self._answers.pop(_raw(given[begin]), None)) is not None:
            messages.append(answer)
        if len(messages) < len(given):
            messages += normal_messages([_known_keys(m) for m in given[len(messages) :]], before=messages)
        if next(image_parts(messages[begin:]), None) is not None:
            return Conversation(messages, [])
        paths += path_keys(messages[begin:], paths)
        if known is not None:
            self._known.remove(known)
        conversation = Conversation(messages, paths)
        self._known.append(_Known(raw[:-1], conversation))
        del self._known[:-_MAX_CONVERSATIONS]
        return conversation


def to_json(value: Any) -> bytes:
    """A JSON value as it is sent."""
    try:
        return orjson.dumps(value)
    except TypeError:  # integers over 64 bits
        return json.dumps(value).encode()


def _begins(raw: bytes, known: bytes) -> bool:
    """Whether a list of messages begins with all those of a known one."""
    return raw.startswith(known) and raw[len(known)] in b",]"


def _length(known: _Known) -> int:
    return len(known.raw)


def _raw(given: Any) -> bytes:
    try:
        return orjson.dumps(given)
    except TypeError as e:
        raise DataError("a message is nested too deeply: at most 250 objects and lists within each other") from e


def known_tools(given: Any) -> list[dict[str, Any]]:
    """The tools of a request as function schemas. Equal tools are one object, which all requests share.

    Raises:
        DataError: one of them is not a function.
    """
    if not given and isinstance(given, list | None):
        return []
    raw = orjson.dumps(given)
    return _shared_tools(raw) if len(raw) <= _MAX_SHARED_BYTES else _tools(raw)


def _tools(raw: bytes) -> list[dict[str, Any]]:
    given = orjson.loads(raw)
    for tool in given if isinstance(given, list) else ():
        if isinstance(tool, dict) and tool.get("type", "function") not in ("function", "custom"):
            raise DataError(
                f"tools of type {tool['type']!r:.60} are not served; declare functions, which the agent executes"
            )
    keep = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {k: t["function"][k] for k in keep if t["function"].get(k) is not None}}
        for t in normal_tools(given)
    ]


_shared_tools = lru_cache(maxsize=512)(_tools)


_MESSAGE_KEYS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id"))
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def _known_keys(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {k: v for k, v in message.items() if k in _MESSAGE_KEYS}
    for key in _REASONING_KEYS:
        if isinstance(message.get(key), str):
            kept[key] = message[key]
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if isinstance(kept.get("content"), list):
        kept["content"] = [_known_part(p) for p in kept["content"]]
    if kept.get("role") == "assistant" and kept.get("content") is None and not kept.get("tool_calls"):
        kept["content"] = ""
    return kept


def _known_part(part: Any) -> Any:
    """A part of a content without cache markers; a refusal is text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return {k: v for k, v in part.items() if k not in ("cache_control", "annotations", "logprobs", "citations")}
