"""DeepSeek V3 and R1 (calls as fenced JSON after `function`) and V3.1 (calls as a name and JSON), with their fullwidth-bar tokens.

Source: the chat templates of DeepSeek-V3, R1 and V3.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, read_arguments, read_json
from agentrl.render.formats.scan import BlockFormat
from agentrl.types import ParseError

_SEP = "<｜tool▁sep｜>"
_FENCE = re.compile(r"\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True)
class DeepSeekFormat(BlockFormat):
    """Both ways of writing a call are read."""

    name: str = "deepseek_v3"
    open: str = "<｜tool▁call▁begin｜>"
    close: str | None = "<｜tool▁call▁end｜>"
    wrappers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    own: tuple[str, ...] = (*wrappers, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _SEP)

    def read(self, body: str) -> list[Read]:
        """One call per block."""
        first, sep, rest = body.partition(_SEP)
        if not sep:
            return [ParseError("structure", f"expected {_SEP} in the call", body)]
        line, newline, fenced = rest.partition("\n")
        match = _FENCE.fullmatch(fenced)
        name, text = (line, match.group(1)) if newline and match else (first, rest)
        value = read_json(text)
        return [value if isinstance(value, ParseError) else read_arguments(name.strip(), value, body)]


FAMILY = Family("deepseek", ("<｜Assistant｜>",), "deepseek_v3", ends=("<｜end▁of▁sentence｜>",))
