"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": …, "id": …}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` from tokenizer v11 on. No headers.

Source: the chat templates of Mistral's instruct models. Ids have nine alphanumeric characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat, BlockScan
from agentrl.render.formats.json_calls import ParsedCall, as_tool_calls, check_call, json_end, read_arguments, read_json
from agentrl.types import Action, Message, ParseError

_ARGS = "[ARGS]"
_ID = "[CALL_ID]"
_ID_LENGTH = 9


@dataclass(frozen=True)
class MistralFormat(BlockFormat):
    """Calls after a marker, to the end of the turn or the next marker."""

    name: str = "mistral"
    opening: str = "[TOOL_CALLS]"

    def read_block(self, body: str) -> list[ParsedCall]:
        value = read_json(body)
        if isinstance(value, ParseError):
            return [_read_named(part) for part in self._split_named(body)] if _ARGS in body else [value]
        if value == []:
            return [ParseError("structure", "the list of calls is empty", body)]
        return [check_call(v, body) for v in (value if isinstance(value, list) else [value])]

    def _split_named(self, body: str) -> list[str]:
        """The calls of the notation with names: each ends at the next marker after its arguments."""
        parts, at = [], 0
        while at >= 0:
            arguments = body.find(_ARGS, at) + len(_ARGS)
            begin = body.find(self.opening, at)
            if arguments >= len(_ARGS) and not 0 <= begin < arguments:
                begin = body.find(self.opening, json_end(body, arguments) or arguments)
            parts.append(body[at:begin] if begin >= 0 else body[at:])
            at = begin + len(self.opening) if begin >= 0 else -1
        return parts

    def default_call_id(self, index: int) -> str:
        return f"call{index:05d}"

    def structured_message(self, action: Action) -> Message:
        """Calls in a field, so that the template can pair them with their results."""
        if not action.calls:
            return self.message(action)
        content = BlockScan(self, action.text, cut=True).visible
        return {"role": "assistant", "content": content, "tool_calls": as_tool_calls(action.calls)}


def _read_named(text: str) -> ParsedCall:
    name, _, arguments = text.partition(_ARGS)
    name, _, call_id = name.partition(_ID)
    return read_arguments(name.strip(), arguments, text, call_id.strip() or None)


def pad_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls and results filled up to nine characters, which the templates require."""
    padded = []
    for m in messages:
        if isinstance(m.get("tool_call_id"), str):
            m = {**m, "tool_call_id": m["tool_call_id"].ljust(_ID_LENGTH, "0")}
        if m.get("tool_calls"):
            m = {**m, "tool_calls": [{**c, "id": (c.get("id") or "").ljust(_ID_LENGTH, "0")} for c in m["tool_calls"]]}
        padded.append(m)
    return padded


FAMILY = Family(
    name="mistral", marks=("[INST]",), format="mistral", ends=("</s>",), structured=True, adapt=pad_call_ids
)
