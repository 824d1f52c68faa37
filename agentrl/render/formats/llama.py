"""Llama 3: a call is a bare JSON object, after `<|python_tag|>` or at the beginning of the turn; several are separated by `;`.

Sources: the Llama 3.1 and 3.2 chat templates and model cards: `<|eot_id|>` ends a turn, `<|eom_id|>` one that waits for a tool.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, read_separated_calls


@dataclass(frozen=True)
class LlamaFormat(BlockFormat):
    """JSON objects with `name` and `parameters`."""

    name: str = "llama3"
    opening: str = "<|python_tag|>"
    markers: tuple[str, ...] = ("<|python_tag|>",)

    def read_block(self, body: str) -> list[ParsedCall]:
        return read_separated_calls(body, ";")

    def read_unmarked(self, visible: str) -> list[ParsedCall]:
        """A turn that is nothing but JSON objects, the first with a name."""
        text = visible.strip()
        return self.read_block(text) if text.startswith("{") and '"name"' in text else []


FAMILY = Family(
    name="llama3",
    marks=("<|start_header_id|>",),
    format="llama3",
    ends=("<|eot_id|>", "<|eom_id|>"),
    other_stops=("<|end_of_text|>",),
)
