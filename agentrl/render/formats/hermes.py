"""Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number in a turn. ChatML families write it.

Sources: the chat templates of Qwen2, Qwen2.5 and Qwen3, and NousResearch's Hermes function-calling format. Of these only Qwen3's template
drops thinking from the history. `<|endoftext|>` is a stop token of their generation configs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, json_end, read_call


@dataclass(frozen=True)
class HermesFormat(BlockFormat):
    """Calls as JSON in `<tool_call>` tags."""

    name: str = "hermes"
    opening: str = "<tool_call>"
    closing: str | None = "</tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def body_end(self, text: str, at: int) -> int:
        return json_end(text, at) or at

    def read_block(self, body: str) -> list[ParsedCall]:
        return [read_call(body)]


CHATML = Family(
    name="chatml", marks=("<|im_start|>",), format="hermes", ends=("<|im_end|>",), other_stops=("<|endoftext|>",)
)
QWEN3 = replace(CHATML, name="qwen3", marks=("<|im_start|>", "reasoning_content"))
