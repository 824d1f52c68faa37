"""Kimi K2 and K2 Thinking: `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section of calls.

Source: Moonshot's tool-call guidance for Kimi-K2 and the chat templates. The id that the policy wrote is the call's id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, read_arguments, read_json
from agentrl.render.formats.scan import BlockFormat
from agentrl.types import ParseError

_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")


@dataclass(frozen=True)
class KimiFormat(BlockFormat):
    """Calls as an id and JSON between markers."""

    name: str = "kimi_k2"
    open: str = "<|tool_call_begin|>"
    close: str | None = "<|tool_call_end|>"
    wrappers: tuple[str, ...] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    own: tuple[str, ...] = (*wrappers, "<|tool_call_begin|>", "<|tool_call_end|>", _ARGUMENTS)

    def read(self, body: str) -> list[Read]:
        """One call per block."""
        call_id, sep, text = body.partition(_ARGUMENTS)
        match = _ID.fullmatch(call_id.strip())
        if not sep or match is None:
            return [ParseError("structure", f"expected functions.NAME:INDEX{_ARGUMENTS}{{…}} in the call", body)]
        value = read_json(text)
        return [
            value if isinstance(value, ParseError) else read_arguments(match.group(1), value, body, call_id.strip())
        ]


FAMILY = Family("kimi_k2", ("<|im_middle|>",), "kimi_k2", ends=("<|im_end|>",), other_stops=("[EOS]",))
THINKING = Family(
    "kimi_k2_thinking",
    ("<|im_middle|>", "reasoning_content"),
    "kimi_k2",
    ends=("<|im_end|>",),
    other_stops=("[EOS]",),
    fields=True,
)
