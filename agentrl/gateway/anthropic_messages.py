"""Anthropic Messages, and its count_tokens. Form: the types of the package anthropic, `anthropic.types`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.gateway.known_requests import KnownRequests
from agentrl.gateway.openai_chat import arguments_text
from agentrl.gateway.protocol import (
    Event,
    ModelRequest,
    Protocol,
    Reply,
    RequestError,
    check_fields,
    read_messages,
    read_model,
    read_number,
    read_stop,
    read_tools,
)
from agentrl.types import Message

OVERRIDDEN = ("temperature", "top_p", "top_k", "thinking", "output_config")
"""parameters of sampling; the run's own apply, and the client's are recorded"""
_SERVED = frozenset(
    (
        *OVERRIDDEN,
        *"model messages system tools tool_choice max_tokens stop_sequences stream metadata service_tier cache_control betas".split(),
    )
)
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "inference_geo": (),
}
_FINISH = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    408: "timeout_error",
    503: "api_error",
}


def read(body: Mapping[str, Any], known: KnownRequests) -> ModelRequest:
    """A request body. Raises RequestError where it asks for what is not served."""
    check_fields(body, _SERVED, _NEUTRAL)
    choice = body.get("tool_choice") or {}
    if not isinstance(choice, dict):
        raise RequestError(400, f"tool_choice must be an object, found {choice!r:.60}")
    forced = {"tool_choice": choice} if choice.get("type", "auto") not in ("auto", "none") else {}
    allowed = 0 if choice.get("type") == "none" else 1 if choice.get("disable_parallel_tool_use") is True else None
    conversation = read_messages([*_system(body.get("system")), *_conversation(body.get("messages"))], known)
    return ModelRequest(
        protocol="messages",
        model=read_model(body),
        messages=conversation.messages,
        paths=conversation.paths,
        tools=read_tools([_tool(t) for t in body.get("tools") or ()]),
        max_tokens=read_number(body, "max_tokens", None),
        stop=read_stop(body.get("stop_sequences"), "stop_sequences"),
        stream=body.get("stream") is True,
        calls_allowed=allowed,
        overridden={k: body[k] for k in OVERRIDDEN if body.get(k) is not None} | forced,
    )


def write(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    """The answer as one message."""
    (reply,) = replies
    return {
        **_head(request, reply),
        "content": _blocks(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_sequence,
        "usage": _usage(reply, reply.completion_tokens),
    }


def events(request: ModelRequest, replies: Sequence[Reply]) -> Iterator[Event]:
    """The answer as events, each block whole."""
    (reply,) = replies
    head = {
        **_head(request, reply),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(reply, 0),
    }
    yield _event("message_start", message=head)
    for index, block in enumerate(_blocks(reply)):
        empty, delta = _begin_and_delta(block, reply)
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence}
    yield _event("message_delta", delta=end, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def error(failure: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(failure.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


# -- reading -------------------------------------------------------------------------------------------------------------


def _system(value: Any) -> list[Message]:
    if not value:
        return []
    if not isinstance(value, (str, list)):
        raise RequestError(400, f"system must be text or a list of text blocks, found {value!r:.60}")
    return [{"role": "system", "content": value}]


def _conversation(value: Any) -> list[Any]:
    """Messages in the form of Chat Completions: results of tools are messages, calls and thoughts fields."""
    if not isinstance(value, list):
        raise RequestError(400, f"messages must be a list, found {value!r:.60}")
    messages: list[Any] = []
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            messages.append(message)
        elif message.get("role") == "assistant":
            messages.append(_assistant(content))
        else:
            messages += _results_and_rest(message, content)
    return messages


def _assistant(blocks: Sequence[Any]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in map(_block, blocks):
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise RequestError(400, f"content blocks of type {kind!r:.60} are not served in an assistant's message")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _results_and_rest(message: Mapping[str, Any], blocks: Sequence[Any]) -> Iterator[Message]:
    """The results of tools as messages of their own, then the other blocks as one message."""
    rest = []
    for block in map(_block, blocks):
        if block.get("type") == "tool_result":
            content = block.get("content")
            parts = [_part(b) for b in content] if isinstance(content, list) else content
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts or ""}
        else:
            rest.append(_part(block))
    if rest or not blocks:
        yield {"role": message.get("role"), "content": rest}


def _part(block: Any) -> dict[str, Any]:
    kind = _block(block).get("type")
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RequestError(400, f"content blocks of type {kind!r:.60} are not served; send text, or images in base64")


def _block(block: Any) -> Mapping[str, Any]:
    if not isinstance(block, dict):
        raise RequestError(400, f"a content block must be an object, found {block!r:.60}")
    return block


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        return tool
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}


# -- writing -------------------------------------------------------------------------------------------------------------


def _head(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in reply.calls]


def _returned(reply: Reply) -> Message:
    return _assistant(_blocks(replace(reply, reasoning="")))


def _begin_and_delta(block: Mapping[str, Any], reply: Reply) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as it begins, and what completes it."""
    if block["type"] == "tool_use":
        call = next(c for c in reply.calls if c.id == block["id"])
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments_text(call)}
    key = block["type"]
    return {**block, key: ""}, {"type": f"{key}_delta", key: block[key]}


def _stop_reason(reply: Reply) -> str:
    return "stop_sequence" if reply.stop_sequence is not None and reply.finish == "stop" else _FINISH[reply.finish]


def _usage(reply: Reply, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name)


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGES = Protocol("messages", read, write, events, error, _returned, PING)
