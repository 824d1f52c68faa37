"""The Hermes format that Qwen2.5 and Qwen3 use: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number in a turn.

Source: the Qwen2.5 and Qwen3 chat templates, and NousResearch's Hermes function-calling format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.types import Action, FinishReason, Message, ParseError, ToolCall

_THINK = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class HermesFormat:
    """Calls as JSON in `<tool_call>` tags."""

    name: str = "hermes"
    stop: tuple[str, ...] = ()
    inline: bool = False
    needs_tools: bool = True

    def parse(self, text: str, finish_reason: FinishReason, max_calls: int) -> Action:
        """Calls outside thinking, in order. A prefilled `<think>` (a lone `</think>`) counts as thinking too."""
        visible = _THINK.sub("", text)
        if "</think>" in visible:
            visible = visible.rpartition("</think>")[2]
        calls: list[ToolCall] = []
        errors: list[ParseError] = []
        for match in _CALL.finditer(visible):
            body, end = match.group(1), match.group(2)
            if not end and finish_reason is FinishReason.LENGTH:
                break  # cut by length: no error of the policy's
            if not end:
                errors.append(ParseError("structure", "<tool_call> is not closed", body))
                continue
            parsed = read_call(body)
            if isinstance(parsed, ParseError):
                errors.append(parsed)
            elif len(calls) >= max_calls:
                errors.append(ParseError("surplus", f"at most {max_calls} calls in one turn; this one was not made: {body.strip()[:80]}", body))
            else:
                calls.append(ToolCall(parsed[0], parsed[1], f"call_{len(calls)}"))
        answer = None if calls or errors or finish_reason is FinishReason.LENGTH else _answer(visible)
        return Action(text, tuple(calls), tuple(errors), finish_reason, answer=answer)

    def inline_parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Hermes observations open a new turn."""
        raise TypeError("the hermes format is not inline")


def read_call(body: str) -> tuple[str, dict[str, Any]] | ParseError:
    """Name and arguments of one call, or what is wrong with it."""
    try:
        value = json.loads(body, strict=False)  # raw newlines in strings are accepted
    except RecursionError:
        return ParseError("content", "the call is nested too deeply", body)
    except ValueError as e:
        return ParseError("content", f"the call is not JSON: {e}", body)
    if not isinstance(value, dict):
        return ParseError("content", f"the call must be an object with name and arguments, found {type(value).__name__}", body)
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return ParseError("content", "arguments must be an object, found a string", body)
    if not isinstance(name, str) or not name:
        return ParseError("content", "the call has no name", body)
    if not isinstance(arguments, dict):
        found = "none" if "arguments" not in value else type(arguments).__name__
        return ParseError("content", f"arguments of {name!r} must be an object, found {found}", body)
    return name, arguments


def _answer(visible: str) -> str:
    """The text of an answer tag, else all that was said."""
    found = _ANSWER.findall(visible)
    return (found[-1] if found else visible).strip()
