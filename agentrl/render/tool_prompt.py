"""Tools in the system message, for chat templates that leave them out (`--tools-in-prompt`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types import Message

FORMAT = "hermes"
"""the action format that is described"""
_TEXT = """You can call these tools, one JSON schema in each line:

{schemas}

To call a tool, write a JSON object with its name and arguments between these tags:

<tool_call>
{{"name": "{name}", "arguments": {arguments}}}
</tool_call>

You may write several calls. Their results follow in the next messages."""


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with the tools and the format of calls in its system message, which is added if there is none.

    Args:
        messages: the conversation.
        tools: schemas of the tools; at least one.
    """
    first = tools[0].get("function", tools[0])
    parameters = first.get("parameters", {}).get("properties", {})
    text = _TEXT.format(
        schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        name=first["name"],
        arguments=json.dumps(dict.fromkeys(parameters, "…"), ensure_ascii=False),
    )
    if messages and messages[0]["role"] == "system" and isinstance(messages[0].get("content"), str):
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
