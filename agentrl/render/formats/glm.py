"""GLM-4.5 and later: `<tool_call>NAME` and `<arg_key>`/`<arg_value>` pairs. A turn has no end token: the next header stops it.

Sources: the GLM-4.5 and 4.6 chat templates and generation configs (stops: `<|user|>`, `<|observation|>`, `<|endoftext|>`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, check_arguments
from agentrl.types import ParseError

_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


@dataclass(frozen=True)
class GlmFormat(BlockFormat):
    """Calls as a name and key-value pairs in tags. Values are text; the tool's schema gives their type."""

    name: str = "glm4"
    opening: str = "<tool_call>"
    closing: str | None = "</tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read_block(self, body: str) -> list[ParsedCall]:
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


FAMILY = Family(
    name="glm4",
    marks=("[gMASK]<sop>",),
    format="glm4",
    headers=("<|user|>", "<|observation|>"),
    other_stops=("<|endoftext|>",),
)
