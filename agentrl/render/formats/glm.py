"""GLM-4.5 and later: `<tool_call>NAME` and `<arg_key>`/`<arg_value>` pairs. A turn has no end token: the next header stops it.

Source: the GLM-4.5 and 4.6 chat templates and generation configs (stops: `<|user|>`, `<|observation|>`, `<|endoftext|>`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, read_arguments
from agentrl.render.formats.scan import BlockFormat
from agentrl.types import ParseError

_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


@dataclass(frozen=True)
class GlmFormat(BlockFormat):
    """Calls as a name and key-value pairs in tags. Values are text: what type they are is for the tool's schema to say."""

    name: str = "glm4"
    open: str = "<tool_call>"
    close: str | None = "</tool_call>"
    own: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, body: str) -> list[Read]:
        """One call per block."""
        at = body.find("<arg_key>")
        name, rest = (body, "") if at < 0 else (body[:at], body[at:])
        arguments: dict[str, Any] = {}
        end = 0
        for match in _PAIR.finditer(rest):
            if match.start() != end:
                break
            arguments[match.group(1).strip()] = match.group(2)
            end = match.end()
        if rest[end:].strip():
            return [
                ParseError("structure", "expected <arg_key>…</arg_key><arg_value>…</arg_value> pairs in the call", body)
            ]
        return [read_arguments(name.strip(), arguments, body)]


FAMILY = Family(
    "glm4", ("[gMASK]<sop>",), "glm4", headers=("<|user|>", "<|observation|>"), other_stops=("<|endoftext|>",)
)
