"""What earlier requests of a session contained, in the normal form. A request repeats its whole conversation; only what is new is normalised.

A message is known if it has the bytes that it had: equal JSON values with their keys in the same order, after the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from agentrl.core.message_images import image_parts
from agentrl.core.sequences import first_difference
from agentrl.data.message_form import normal_messages, normal_tools
from agentrl.errors import DataError
from agentrl.gateway.message_match import path_keys
from agentrl.types import Message

_MAX_CONVERSATIONS = 4
"""conversations of a session that are kept: an agent and its sub-agents take turns"""

_MAX_SHARED_BYTES = 1 << 18
"""of tools that requests share"""


class Conversation(NamedTuple):
    """Messages in the normal form. A message that is known is the object that it was, and so are those before it."""

    messages: list[Message]
    paths: list[bytes]
    """`path_key` up to each; empty if there are images, which are not loaded yet"""


class _Known(NamedTuple):
    raw: list[bytes]
    """each message as the client sent it"""
    conversation: Conversation


class KnownRequests:
    """The conversations of a session's last requests."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        """the newest last"""

    def messages(self, given: Any) -> Conversation:
        """The messages of a request in the normal form, without keys that no template reads.

        Raises:
            DataError: they are not a conversation.
        """
        if not isinstance(given, list) or not given:
            return Conversation(list(normal_messages(given)), [])
        raw = _raw(given)
        begin, known = max(((_common(k.raw, raw), k) for k in reversed(self._known)), default=(0, None), key=_first)
        earlier = Conversation([], []) if known is None else known.conversation
        messages, paths = earlier.messages[:begin], earlier.paths[:begin]
        if begin < len(given):
            messages += normal_messages([_known_keys(m) for m in given[begin:]], before=messages)
        if next(image_parts(messages[begin:]), None) is not None:
            return Conversation(messages, [])
        conversation = Conversation(messages, [*paths, *path_keys(messages[begin:], paths)])
        if known is not None and begin == len(known.raw):
            self._known.remove(known)
        if known is not None:
            raw[:begin] = known.raw[:begin]
        raw[begin:] = [bytes(memoryview(r)) for r in raw[begin:]]  # orjson's bytes hold a buffer of 4 KiB
        self._known.append(_Known(raw, conversation))
        del self._known[:-_MAX_CONVERSATIONS]
        return conversation


def _common(before: list[bytes], now: list[bytes]) -> int:
    """How many messages two requests have in common, from the first on."""
    return len(before) if before == now[: len(before)] else first_difference(before, now)


def _raw(given: Sequence[Any]) -> list[bytes]:
    try:
        return [orjson.dumps(message) for message in given]
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


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


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
