"""Qwen3-Coder and Qwen3.5: ChatML with calls as XML: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Source: the Qwen3-Coder and Qwen3.5 chat templates. Values are text; the tool's schema gives their type. Nothing is escaped, so a value ends
where what follows continues the call: `</parameter>` before another parameter, or before the end of the function and of the block. Values
may hold other markers, and whole calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat, value_end
from agentrl.render.formats.json_calls import ParsedCall, check_arguments
from agentrl.types import ParseError

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_FUNCTION_OPENING = re.compile(r"\s*<function=([^>\n]*)>")
_FUNCTION_CLOSING = re.compile(r"\s*</function>")
_PARAMETER_OPENING = re.compile(r"\s*<parameter=([^>\n]*)>")
_PARAMETER_MARK = re.compile(r"(<parameter=[^>\n]*>)|</parameter>")
"""group 1: the mark opens"""
_CONTINUATION = re.compile(r"\s*(?:<parameter=[^>\n]*>|</function>\s*(?:</tool_call>|<function=|\Z))")
_Functions = list[tuple[str, dict[str, str], str]]


@dataclass(frozen=True)
class QwenCoderFormat(BlockFormat):
    """Calls as functions and parameters in tags, one or more in a block."""

    name: str = "qwen3_coder"
    text_values: bool = True
    value_closing: str = "</parameter>"
    opening: str = "<tool_call>"
    closing: str | None = "</tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def body_end(self, text: str, at: int) -> int:
        return _well_formed(text, at)[1]

    def read_block(self, body: str) -> list[ParsedCall]:
        functions, end = _well_formed(body, 0)
        if not functions or body[end:].strip():  # some closing marks are left out
            functions = [(name, _parameters(inside), inside) for name, inside in _FUNCTION.findall(body)]
        calls = [check_arguments(*function) for function in functions]
        return calls or [ParseError("structure", "expected <function=NAME>…</function> in the call", body)]


def _well_formed(text: str, at: int) -> tuple[_Functions, int]:
    """The functions (name, parameters, text) that begin at `at` with all their closing marks, and where they end. ([], at): there is none."""
    functions: _Functions = []
    end = at
    while opening := _FUNCTION_OPENING.match(text, end):
        position, parameters = opening.end(), {}
        while parameter := _PARAMETER_OPENING.match(text, position):
            value_at = parameter.end()
            end_at = value_end(text, value_at, _PARAMETER_MARK, _CONTINUATION)
            if end_at < 0:
                return [], at
            parameters[parameter.group(1).strip()] = _without_newlines(text[value_at:end_at])
            position = end_at + len("</parameter>")
        closing = _FUNCTION_CLOSING.match(text, position)
        if closing is None:
            return [], at
        functions.append((opening.group(1), parameters, text[opening.end() : position]))
        end = closing.end()
    return functions, end


def _parameters(text: str) -> dict[str, str]:
    """Values by name, without the newlines next to their tags."""
    return {key.strip(): _without_newlines(value) for key, value in _PARAMETER.findall(text)}


def _without_newlines(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


FAMILY = Family(
    name="qwen3_coder",
    marks=("<|im_start|>", "<function="),
    format="qwen3_coder",
    ends=("<|im_end|>",),
    other_stops=("<|endoftext|>",),
)
