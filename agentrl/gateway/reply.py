"""A generation as the client reads it."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.engine.base import Generation
from agentrl.gateway.protocol import ModelRequest, Reply
from agentrl.render.formats.block_format import without_thinking
from agentrl.render.formats.json_calls import as_tool_calls
from agentrl.render.renderer import Renderer
from agentrl.types import Action, FinishReason, Message, ToolCall


def reply_of(
    renderer: Renderer, action: Action, generation: Generation, request: ModelRequest, number: str, prompt_tokens: int
) -> Reply:
    """The reply for a parsed generation. What could not be parsed as a call stays text."""
    message = renderer.format.structured_message(action)
    text, reasoning = str(message.get("content") or ""), str(message.get("reasoning_content") or "")
    if action.errors and not action.calls:
        text = without_thinking(action.text).strip()
    stop = generation.matched_stop if generation.matched_stop in request.stop else None
    if isinstance(stop, str):
        text = text.partition(stop)[0]
    finish = "stop"
    if generation.finish_reason is FinishReason.LENGTH:
        finish = "length"
    elif action.calls:
        finish = "tool_calls"
    calls = tuple(ToolCall(c.name, c.arguments, f"call_{number}_{i}") for i, c in enumerate(action.calls))
    return Reply(
        text=text,
        reasoning=reasoning,
        calls=calls,
        finish=finish,
        stop_sequence=stop if isinstance(stop, str) else None,
        number=number,
        prompt_tokens=prompt_tokens,
        cached_tokens=generation.cached_tokens,
        completion_tokens=len(generation.ids),
        message=answered_message(text, calls),
    )


def answered_message(text: str, calls: Sequence[ToolCall]) -> Message:
    """A reply in the normal form, as a client sends it back."""
    message: Message = {"role": "assistant", "content": text}
    return {**message, "tool_calls": as_tool_calls(calls)} if calls else message
