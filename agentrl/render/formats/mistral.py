"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": …, "id": …}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` from tokenizer v11 on. No headers.

Source: the chat templates of Mistral's instruct models. Ids have nine alphanumeric characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, as_tool_calls, call_of, read_arguments, read_json
from agentrl.render.formats.scan import BlockFormat, spoken
from agentrl.types import Action, Message, ParseError

_ARGS = "[ARGS]"
_ID = "[CALL_ID]"
_LENGTH = 9


@dataclass(frozen=True)
class MistralFormat(BlockFormat):
    """Calls after a marker, to the end of the turn or the next marker."""

    name: str = "mistral"
    open: str = "[TOOL_CALLS]"

    def read(self, body: str) -> list[Read]:
        """All the turn's calls: an array, or names with arguments."""
        if _ARGS in body:
            return [self._named(part) for part in body.split(self.open)]
        value = read_json(body)
        if isinstance(value, ParseError):
            return [value]
        if isinstance(value, list) and value:
            return [call_of(v, body) for v in value]
        if isinstance(value, list):
            return [ParseError("structure", "the list of calls is empty", body)]
        return [call_of(value, body)]

    def call_id(self, index: int) -> str:
        """Nine characters."""
        return f"call{index:05d}"

    def as_data(self, action: Action) -> Message:
        """Calls as data: the template pairs them with their results."""
        if not action.calls:
            return self.message(action)
        content = spoken(action.text).partition(self.open)[0]
        return {"role": "assistant", "content": content, "tool_calls": as_tool_calls(action)}

    def _named(self, part: str) -> Read:
        name, _, text = part.partition(_ARGS)
        name, _, call_id = name.partition(_ID)
        value = read_json(text)
        return (
            value
            if isinstance(value, ParseError)
            else read_arguments(name.strip(), value, part, call_id.strip() or None)
        )


def nine_characters(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls and results filled up to nine characters, which templates insist on."""
    out = []
    for m in messages:
        if isinstance(m.get("tool_call_id"), str) and len(m["tool_call_id"]) < _LENGTH:
            m = {**m, "tool_call_id": m["tool_call_id"] + "0" * (_LENGTH - len(m["tool_call_id"]))}
        if m.get("tool_calls"):
            m = {**m, "tool_calls": [{**c, "id": (c.get("id") or "").ljust(_LENGTH, "0")} for c in m["tool_calls"]]}
        out.append(m)
    return out


FAMILY = Family("mistral", ("[INST]",), "mistral", ends=("</s>",), fields=True, adapt=nine_characters)
