"""DeepSeek V3 and R1 (calls as fenced JSON after `function`) and V3.1 (calls as a name and JSON), with fullwidth bars in the tokens.

Source: the chat templates of DeepSeek-V3, R1 and V3.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, json_end, read_arguments
from agentrl.types import ParseError

_SEPARATOR = "<｜tool▁sep｜>"
_HEAD = re.compile(rf"[^<\n]*{_SEPARATOR}(?:[^\n]*\n\s*```(?:json)?\n)?")
_FENCE = re.compile(r"\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True)
class DeepSeekFormat(BlockFormat):
    """Calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, in both notations."""

    name: str = "deepseek_v3"
    opening: str = "<｜tool▁call▁begin｜>"
    closing: str | None = "<｜tool▁call▁end｜>"
    wrappers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    markers: tuple[str, ...] = (*wrappers, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _SEPARATOR)

    def body_end(self, text: str, at: int) -> int:
        head = _HEAD.match(text, at)
        return (json_end(text, head.end()) if head else None) or at

    def read_block(self, body: str) -> list[ParsedCall]:
        first, separator, rest = body.partition(_SEPARATOR)
        if not separator:
            return [ParseError("structure", f"expected {_SEPARATOR} in the call", body)]
        line, newline, fenced = rest.partition("\n")
        match = _FENCE.fullmatch(fenced)
        name, arguments = (line, match.group(1)) if newline and match else (first, rest)
        return [read_arguments(name.strip(), arguments, body)]


FAMILY = Family(name="deepseek", marks=("<｜Assistant｜>",), format="deepseek_v3", ends=("<｜end▁of▁sentence｜>",))
