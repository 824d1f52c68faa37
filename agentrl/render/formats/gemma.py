"""Gemma 3: `model` for the assistant, no role for tools: their results go in as a user's turn. Calls as Python: `[f(x=1), g()]`.

Source: Gemma 3's chat template, and Google's page on function calling with Gemma (Python style). Turns must alternate, so messages of
one side in a row are joined.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.render.base import Family
from agentrl.render.formats.call_json import Read, read_arguments
from agentrl.render.formats.scan import BlockFormat
from agentrl.types import Message, ParseError

_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(.*\)\s*\]", re.DOTALL)
_MAX = 100_000


@dataclass(frozen=True)
class PythonicFormat(BlockFormat):
    """A turn that is a list of Python calls with keyword arguments, bare or fenced; only literals are arguments."""

    name: str = "pythonic"
    open: str = "```tool_code\n"
    close: str | None = "```"

    def read(self, body: str) -> list[Read]:
        """A list of calls, or one call."""
        text = body.strip()
        return _python_calls(text if text.startswith("[") else f"[{text}]", body)

    def read_bare(self, visible: str) -> list[Read] | None:
        """A turn that is a list of calls and nothing else."""
        text = visible.strip()
        return _python_calls(text, text) if _CALLS.fullmatch(text) else None


def _python_calls(text: str, body: str) -> list[Read]:
    if len(text) > _MAX:
        return [ParseError("content", "the call is too long", body[:200])]
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return [ParseError("structure", f"the calls are not Python: {type(e).__name__}", body)]
    if not isinstance(tree, ast.List) or not tree.elts:
        return [ParseError("structure", "expected a list of calls", body)]
    return [_python_call(node, body) for node in tree.elts]


def _python_call(node: ast.expr, body: str) -> Read:
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, (ast.Name, ast.Attribute))
        or node.args
        or any(k.arg is None for k in node.keywords)
    ):
        return ParseError("structure", "expected a call with keyword arguments", body)
    try:
        arguments: dict[str, Any] = {str(k.arg): _as_json(ast.literal_eval(k.value)) for k in node.keywords}
        name = ast.unparse(node.func)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ParseError("content", "an argument is not a literal", body)
    return read_arguments(name, arguments, body)


def _as_json(value: Any) -> Any:
    """The literal as JSON would have it: lists for tuples, text for numbers and constants that are keys. What JSON has not stays."""
    if isinstance(value, (list, tuple)):
        return [_as_json(v) for v in value]
    if isinstance(value, dict):
        return {_key(k): _as_json(v) for k, v in value.items()}
    return value


def _key(key: Any) -> Any:
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Tools' messages as the user's, system messages after the first too, and neighbours of one role joined."""
    out: list[Message] = []
    for i, m in enumerate(messages):
        role = "user" if m["role"] == "tool" or (m["role"] == "system" and i > 0) else m["role"]
        content = m.get("content") or ""
        previous = out[-1] if out else None
        if (
            previous is not None
            and previous["role"] == role != "system"
            and isinstance(content, str)
            and isinstance(previous["content"], str)
        ):
            previous["content"] = previous["content"] + "\n" + content if previous["content"] else content
        else:
            out.append({"role": role, "content": content})
    return out


FAMILY = Family(
    "gemma3", ("<start_of_turn>",), "pythonic", ends=("<end_of_turn>",), other_stops=("<eos>",), adapt=alternating
)
