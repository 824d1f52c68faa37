"""What earlier requests of a session contained, in the normal form. A request repeats its whole conversation; only what is new is normalised.

A message is known if it has the bytes that it had: equal JSON values with their keys in the same order, after the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from agentrl.core.message_images import image_parts
from agentrl.data.message_form import normal_messages, normal_tools
from agentrl.errors import DataError
from agentrl.gateway.message_match import message_key
from agentrl.types import Message

_MAX_CONVERSATIONS = 4
"""conversations of a session that are kept: an agent and its sub-agents take turns"""

_MAX_SHARED_BYTES = 1 << 18
"""of tools that requests share"""


class Conversation(NamedTuple):
    """Messages in the normal form."""

    messages: list[Message]
    keys: list[bytes]
    """`message_key` of each; empty if there are images, which are not loaded yet"""


class _Known(NamedTuple):
    given: list[Any]
    """the messages as the client sent them; their texts are those of the normal form"""
    flat: list[bool]
    """whether all values of a message are texts or null"""
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
        begin, known = max(((_common(k, given), k) for k in reversed(self._known)), default=(0, None), key=_first)
        messages, keys, flat = _beginning(known, begin)
        if begin < len(given):
            messages += normal_messages([_known_keys(m) for m in given[begin:]], before=messages)
        if next(image_parts(messages[begin:]), None) is not None:
            return Conversation(messages, [])
        keys += map(message_key, messages[begin:])
        flat += map(_is_flat, given[begin:])
        conversation = Conversation(messages, keys)
        if known is not None and begin == len(known.given):
            self._known.remove(known)
            given = [*known.given, *given[begin:]]
        self._known.append(_Known(given, flat, conversation))
        del self._known[:-_MAX_CONVERSATIONS]
        return conversation


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


def _common(known: _Known, given: Sequence[Any]) -> int:
    """How many messages a request has in common with an earlier one, from the first on."""
    count = 0
    for before, flat, now in zip(known.given, known.flat, given, strict=False):
        if before != now or not ([*before] == [*now] if flat else orjson.dumps(before) == orjson.dumps(now)):
            break
        count += 1
    return count


def _beginning(known: _Known | None, count: int) -> tuple[list[Message], list[bytes], list[bool]]:
    if known is None:
        return [], [], []
    return known.conversation.messages[:count], known.conversation.keys[:count], known.flat[:count]


def _is_flat(message: Any) -> bool:
    return all(value is None or type(value) is str for value in message.values())


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
