"""Qwen3-Coder and Qwen3.5: ChatML with calls as XML: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Source: the Qwen3-Coder and Qwen3.5 chat templates. Values are text; the tool's schema gives their type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, check_arguments
from agentrl.types import ParseError

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class QwenCoderFormat(BlockFormat):
    """Calls as functions and parameters in tags, one or more in a block."""

    name: str = "qwen3_coder"
    opening: str = "<tool_call>"
    closing: str | None = "</tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def read_block(self, body: str) -> list[ParsedCall]:
        calls = [check_arguments(name, _parameters(inside), inside) for name, inside in _FUNCTION.findall(body)]
        return calls or [ParseError("structure", "expected <function=NAME>…</function> in the call", body)]


def _parameters(text: str) -> dict[str, str]:
    """Values by name, without the newlines next to their tags."""
    return {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(text)}


FAMILY = Family(
    name="qwen3_coder",
    marks=("<|im_start|>", "<function="),
    format="qwen3_coder",
    ends=("<|im_end|>",),
    other_stops=("<|endoftext|>",),
)
