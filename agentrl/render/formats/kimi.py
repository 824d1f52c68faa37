"""Kimi K2 and K2 Thinking: `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section of calls.

Sources: Moonshot's tool-call guidance for Kimi-K2 and the chat templates. The id that the policy wrote is the call's id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, json_end, read_arguments
from agentrl.types import ParseError

_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")
_HEAD = re.compile(r"\s*[\w.\-]+:\d+\s*" + re.escape(_ARGUMENTS))


@dataclass(frozen=True)
class KimiFormat(BlockFormat):
    """Calls as an id and JSON between markers."""

    name: str = "kimi_k2"
    opening: str = "<|tool_call_begin|>"
    closing: str | None = "<|tool_call_end|>"
    wrappers: tuple[str, ...] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    markers: tuple[str, ...] = (*wrappers, "<|tool_call_begin|>", "<|tool_call_end|>", _ARGUMENTS)

    def body_end(self, text: str, at: int) -> int:
        head = _HEAD.match(text, at)
        return (json_end(text, head.end()) if head else None) or at

    def read_block(self, body: str) -> list[ParsedCall]:
        call_id, separator, arguments = body.partition(_ARGUMENTS)
        call_id = call_id.strip()
        match = _ID.fullmatch(call_id)
        if not separator or match is None:
            return [ParseError("structure", f"expected functions.NAME:INDEX{_ARGUMENTS}{{…}} in the call", body)]
        return [read_arguments(match.group(1), arguments, body, call_id)]


KIMI_K2 = Family(
    name="kimi_k2",
    marks=("<|im_middle|>",),
    format="kimi_k2",
    ends=("<|im_end|>",),
    other_stops=("[EOS]",),
    call_id="functions.{name}:{index}",
)
KIMI_K2_THINKING = replace(
    KIMI_K2, name="kimi_k2_thinking", marks=("<|im_middle|>", "reasoning_content"), structured=True
)
