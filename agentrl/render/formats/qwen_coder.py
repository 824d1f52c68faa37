"""Qwen3-Coder and Qwen3.5: ChatML with calls as XML: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Source: the Qwen3-Coder and Qwen3.5 chat templates. Values are text: what type they are is for the tool's schema to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, read_arguments
from agentrl.render.formats.scan import BlockFormat
from agentrl.types import ParseError

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class QwenCoderFormat(BlockFormat):
    """Calls as functions and parameters in tags."""

    name: str = "qwen3_coder"
    open: str = "<tool_call>"
    close: str | None = "</tool_call>"
    own: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def read(self, body: str) -> list[Read]:
        """One call or more per block."""
        found = [self._call(m.group(1), m.group(2)) for m in _FUNCTION.finditer(body)]
        return list(found) or [ParseError("structure", "expected <function=NAME>…</function> in the call", body)]

    def _call(self, name: str, body: str) -> Read:
        arguments: dict[str, Any] = {}
        for match in _PARAMETER.finditer(body):
            arguments[match.group(1).strip()] = _unframed(match.group(2))
        return read_arguments(name, arguments, body)


def _unframed(value: str) -> str:
    """The value without the newline after its opening and before its closing tag."""
    return value.removeprefix("\n").removesuffix("\n")


FAMILY = Family(
    "qwen3_coder", ("<|im_start|>", "<function="), "qwen3_coder", ends=("<|im_end|>",), other_stops=("<|endoftext|>",)
)
