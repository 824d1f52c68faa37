"""Which parts of a conversation a chat template leaves out of the prompt, found by marks that are added to every part."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.core.message_images import is_image
from agentrl.types import Message

_CLOSE = "</think>"
_REASONING_KEYS = ("reasoning_content", "thinking")


class LeftOut(NamedTuple):
    """What a template leaves out of a prompt."""

    parts: tuple[str, ...]
    """contents and calls, each with the index of its message"""
    reasoning: int
    """messages whose reasoning is left out, as many templates do on purpose"""
    names: int = 0
    """messages whose `name` is left out, as most templates do"""
    messages: tuple[int, ...] = ()
    """the index of the message of each part"""

    def of_messages(self, numbers: Container[int]) -> LeftOut:
        """The parts of these messages only."""
        kept = [(part, n) for part, n in zip(self.parts, self.messages, strict=True) if n in numbers]
        return self._replace(parts=tuple(part for part, _ in kept), messages=tuple(n for _, n in kept))

    def sentence(self, where: str) -> str:
        """The parts in words, and what to do."""
        return (
            f"{where}: its chat template leaves {' and '.join(self.parts)} out of the prompt, so the policy would not see it; "
            "write it into the content of a message as the model would, or leave it out"
        )


def may_leave_out(messages: Sequence[Message]) -> bool:
    """Whether the conversation is more than a system message and the user's without names: templates show these."""
    if any(m.get("name") for m in messages):
        return True
    return any(m["role"] != "user" for m in messages[1:]) or (bool(messages) and messages[0]["role"] != "user")


def left_out(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> LeftOut:
    """Render the conversation with a mark in each part, and name the parts whose mark is missing.

    Raises:
        TemplateError: the template refuses the conversation.
    """
    marks = _Marks()
    marked = [marks.message(number, message) for number, message in enumerate(messages)]
    text = render(marked)
    missing = [(part, number) for part, found, number in marks.parts if not all(mark in text for mark in found)]
    names = sum(mark not in text for mark in marks.names)
    reasoning = {number for number, found in marks.reasoning.items() if not any(mark in text for mark in found)}
    return LeftOut(tuple(part for part, _ in missing), len(reasoning), names, tuple(number for _, number in missing))


class _Marks:
    """Adds marks to messages."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, tuple[str, ...], int]] = []
        """(part, its marks, index of its message)"""
        self.names: list[str] = []
        """the marks in the names of speakers"""
        self.reasoning: dict[int, list[str]] = {}
        """the marks in the reasoning of each message; a template reads one of the fields"""
        self._count = 0

    def message(self, number: int, message: Message) -> Message:
        marked = dict(message)
        for key in _REASONING_KEYS:
            if isinstance(message.get(key), str) and message[key].strip():
                marked[key] = message[key] + self._reasoning(number)
        if message["role"] != "tool" and isinstance(message.get("name"), str):
            self._count += 1
            self.names.append(f"Mark{self._count}n5d")
            marked["name"] = f"{message['name']}_{self.names[-1]}"
        content = message.get("content")
        what = f"the content of message {number} (role {message['role']})"
        if isinstance(content, str):
            marked["content"] = self._content(number, message, content, what)
        elif isinstance(content, (list, tuple)):
            marked["content"] = [self._part(number, part, what) for part in content]
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(number, call) for call in message["tool_calls"]]
        return marked

    def _content(self, number: int, message: Message, content: str, what: str) -> str:
        before, tag, after = content.rpartition(_CLOSE) if message["role"] == "assistant" else ("", "", content)
        if tag:
            before += self._reasoning(number)
        return before + tag + (after + self._mark(number, what) if after.strip() else after)

    def _part(self, number: int, part: Any, what: str) -> Any:
        if is_image(part) or not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return part
        return {**part, "text": part["text"] + self._mark(number, what)} if part["text"].strip() else part

    def _call(self, number: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", call)
        name = str(function.get("name"))
        mark = self._mark(number, f"the call of {name!r} in message {number}")
        marked = {**function, "arguments": _with_argument(function.get("arguments"), mark)}
        if name not in str(call.get("id")):  # Kimi's template shows the id and no name
            part, (shown,), _ = self.parts[-1]
            self.parts[-1] = part, (shown, f"{shown}f"), number
            marked["name"] = f"{name}_{shown}f"
        return {**call, "function": marked} if "function" in call else marked

    def _reasoning(self, number: int) -> str:
        self._count += 1
        mark = f" Mark{self._count}r5d"
        self.reasoning.setdefault(number, []).append(mark.strip())
        return mark

    def _mark(self, number: int, part: str) -> str:
        self._count += 1
        mark = f"Mark{self._count}p5d"
        self.parts.append((part, (mark,), number))
        return " " + mark


def _with_argument(arguments: Any, mark: str) -> Any:
    """The arguments with one more, as an object or as its JSON text, as they were."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments + mark
        return json.dumps({**value, "mark": mark}, ensure_ascii=False) if isinstance(value, dict) else arguments + mark
    return {**(arguments or {}), "mark": mark}
