"""GLM-4.5 and later: `<tool_call>NAME` and `<arg_key>`/`<arg_value>` pairs. A turn has no end token: the next header stops it.

Nothing is escaped, so a value ends at an `</arg_value>` before another key or the end of the block. Values may hold other markers.

Sources: the GLM-4.5 and 4.6 chat templates and generation configs (stops: `<|user|>`, `<|observation|>`, `<|endoftext|>`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat, value_end
from agentrl.render.formats.json_calls import ParsedCall, check_arguments
from agentrl.types import ParseError

_NAME = re.compile(r"[^<]*")
_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_VALUE_MARK = re.compile(r"(<arg_value>)|</arg_value>")
"""group 1: the mark opens"""
_CONTINUATION = re.compile(r"\s*(?:<arg_key>|</tool_call>|\Z)")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


@dataclass(frozen=True)
class GlmFormat(BlockFormat):
    """Calls as a name and key-value pairs in tags. Values are text; the tool's schema gives their type."""

    name: str = "glm4"
    text_values: bool = True
    value_closing: str = "</arg_value>"
    opening: str = "<tool_call>"
    closing: str | None = "</tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def body_end(self, text: str, at: int) -> int:
        return _well_formed(text, at)[2] or at

    def read_block(self, body: str) -> list[ParsedCall]:
        name, pairs, position = _well_formed(body, 0)
        if position and not body[position:].strip():
            return [check_arguments(name, pairs, body)]
        at = body.find("<arg_key>")
        end = at = len(body) if at < 0 else at
        arguments: dict[str, str] = {}
        while match := _PAIR.match(body, end):
            arguments[match.group(1).strip()] = match.group(2)
            end = match.end()
        if body[end:].strip():
            return [
                ParseError("structure", "expected <arg_key>…</arg_key><arg_value>…</arg_value> pairs in the call", body)
            ]
        return [check_arguments(body[:at].strip(), arguments, body)]


def _well_formed(text: str, at: int) -> tuple[str, dict[str, str], int]:
    """The name and the pairs of the call that begins at `at`, and where it ends. End 0: a value has no end."""
    match = _NAME.match(text, at)
    assert match is not None  # it matches the empty text too
    pairs: dict[str, str] = {}
    end = match.end()
    while key := _KEY.match(text, end):
        end_at = value_end(text, key.end(), _VALUE_MARK, _CONTINUATION)
        if end_at < 0:
            return "", {}, 0
        pairs[key.group(1).strip()] = text[key.end() : end_at]
        end = end_at + len("</arg_value>")
    return match.group().strip(), pairs, end


FAMILY = Family(
    name="glm4",
    marks=("[gMASK]<sop>",),
    format="glm4",
    headers=("<|user|>", "<|observation|>"),
    other_stops=("<|endoftext|>",),
)
