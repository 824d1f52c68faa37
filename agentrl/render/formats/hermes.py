"""The Hermes format that Qwen2.5 and Qwen3 use: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number in a turn.

Source: the Qwen2.5 and Qwen3 chat templates, and NousResearch's Hermes function-calling format.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.render.formats.call_json import Read, read_call
from agentrl.render.formats.scan import BlockFormat


@dataclass(frozen=True)
class HermesFormat(BlockFormat):
    """Calls as JSON in `<tool_call>` tags."""

    name: str = "hermes"
    open: str = "<tool_call>"
    close: str | None = "</tool_call>"
    own: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def read(self, body: str) -> list[Read]:
        """One call per block."""
        return [read_call(body)]
