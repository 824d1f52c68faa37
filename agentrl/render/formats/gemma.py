"""Gemma 3: `model` for the assistant, no role for tools: their results become a user's turn. Calls as Python: `[f(x=1), g()]`.

Sources: Gemma 3's chat template, and Google's page on function calling with Gemma (Python style). Turns must alternate, so consecutive
messages of one side are joined.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.render.base import Family
from agentrl.render.formats.block_format import BlockFormat
from agentrl.render.formats.json_calls import ParsedCall, as_json, check_arguments
from agentrl.types import Message, ParseError

_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(.*\)\s*\]", re.DOTALL)
_MAX_CHARACTERS = 100_000
_MAX_FENCES = 16
"""closing marks inside strings that are looked past"""


@dataclass(frozen=True)
class PythonicFormat(BlockFormat):
    """A turn that is a list of Python calls with keyword arguments, bare or fenced. Arguments must be literals."""

    name: str = "pythonic"
    opening: str = "```tool_code\n"
    closing: str | None = "```"

    def body_end(self, text: str, at: int) -> int:
        end = at
        for _ in range(_MAX_FENCES):
            end = text.find("```", end)
            if end < 0:
                break
            if not any(isinstance(c, ParseError) for c in self.read_block(text[at:end])):
                return end
            end += 1
        return at

    def read_block(self, body: str) -> list[ParsedCall]:
        text = body.strip()
        return _read_calls(text if text.startswith("[") else f"[{text}]", body)

    def read_unmarked(self, visible: str) -> list[ParsedCall]:
        """A turn that is nothing but a list of calls."""
        text = visible.strip()
        return _read_calls(text, text) if _CALLS.fullmatch(text) else []


def _read_calls(text: str, body: str) -> list[ParsedCall]:
    if len(text) > _MAX_CHARACTERS:
        return [ParseError("content", "the call is too long", body[:200])]
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return [ParseError("structure", f"the calls are not Python: {type(e).__name__}", body)]
    if not isinstance(tree, ast.List) or not tree.elts:
        return [ParseError("structure", "expected a list of calls", body)]
    return [_read_call(node, body) for node in tree.elts]


def _read_call(node: ast.expr, body: str) -> ParsedCall:
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, (ast.Name, ast.Attribute))
        or node.args
        or any(k.arg is None for k in node.keywords)
    ):
        return ParseError("structure", "expected a call with keyword arguments", body)
    try:
        arguments: dict[str, Any] = {str(k.arg): as_json(ast.literal_eval(k.value)) for k in node.keywords}
        name = ast.unparse(node.func)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ParseError("content", "an argument is not a literal", body)
    return check_arguments(name, arguments, body)


def alternate_turns(messages: Sequence[Message]) -> list[Message]:
    """The messages with tools' results and later system messages as the user's, and neighbours of one role joined."""
    turns: list[Message] = []
    for i, m in enumerate(messages):
        role = "user" if m["role"] == "tool" or (m["role"] == "system" and i > 0) else m["role"]
        content = m.get("content") or ""
        previous = turns[-1] if turns else None
        if (
            previous is not None
            and previous["role"] == role != "system"
            and isinstance(content, str)
            and isinstance(previous["content"], str)
        ):
            # `+`, not an f-string: contents may be symbolic strings, which formatting would lose
            previous["content"] = previous["content"] + "\n" + content if previous["content"] else content
        else:
            turns.append({"role": role, "content": content})
    return turns


FAMILY = Family(
    name="gemma3",
    marks=("<start_of_turn>",),
    format="pythonic",
    ends=("<end_of_turn>",),
    other_stops=("<eos>",),
    adapt=alternate_turns,
)
