"""Llama 3: a call is a bare JSON object, after `<|python_tag|>` or at the beginning of the turn; several are separated by `;`.

Source: the Llama 3.1 and 3.2 chat templates and model cards: `<|eot_id|>` ends a turn, `<|eom_id|>` one that waits for a tool.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, call_of, split_values
from agentrl.render.formats.scan import BlockFormat


@dataclass(frozen=True)
class LlamaFormat(BlockFormat):
    """JSON objects with `name` and `parameters`."""

    name: str = "llama3"
    open: str = "<|python_tag|>"
    own: tuple[str, ...] = ("<|python_tag|>",)

    def read(self, body: str) -> list[Read]:
        """Objects separated by semicolons."""
        return [v if not isinstance(v, tuple) else call_of(v[0], v[1]) for v in split_values(body, ";")]

    def read_bare(self, visible: str) -> list[Read] | None:
        """A turn that is a JSON object with a name, and nothing else before it."""
        text = visible.strip()
        return self.read(text) if text.startswith("{") and '"name"' in text else None


FAMILY = Family(
    "llama3", ("<|start_header_id|>",), "llama3", ends=("<|eot_id|>", "<|eom_id|>"), other_stops=("<|end_of_text|>",)
)
