"""OpenAI Responses, without a store: every request holds the whole input. Form: the types of the package openai, `openai.types.responses`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.gateway.known_requests import KnownRequests
from agentrl.gateway.openai_chat import arguments_text, error, read_overridden, read_tool_choice
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
    read_tools,
)
from agentrl.types import Message

OVERRIDDEN = ("temperature", "top_p", "reasoning", "text")
"""parameters of sampling; the run's own apply, and the client's are recorded"""
_SERVED = frozenset(
    (
        *OVERRIDDEN,
        *"model input instructions tools tool_choice parallel_tool_calls max_output_tokens stream user metadata store".split(),
        *"include service_tier prompt_cache_key prompt_cache_retention safety_identifier stream_options".split(),
    )
)
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "prompt": (),
    "max_tool_calls": (),
}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read(body: Mapping[str, Any], known: KnownRequests) -> ModelRequest:
    """A request body. Raises RequestError where it asks for what is not served."""
    _check_stored(body)
    check_fields(body, _SERVED, _NEUTRAL)
    _check_text(body.get("text"))
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    conversation = read_messages([*system, *_conversation(body.get("input"))], known)
    return ModelRequest(
        protocol="responses",
        model=read_model(body),
        messages=conversation.messages,
        paths=conversation.paths,
        tools=read_tools(body.get("tools")),
        max_tokens=read_number(body, "max_output_tokens", None),
        stream=body.get("stream") is True,
        calls_allowed=read_tool_choice(body),
        overridden=read_overridden(body, OVERRIDDEN),
    )


def write(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    """The answer as one response."""
    (reply,) = replies
    cut = reply.finish == "length"
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    return {
        **_head(request, reply),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply),
        "usage": usage,
    }


def events(request: ModelRequest, replies: Sequence[Reply]) -> Iterator[Event]:
    """The answer as events, each item whole."""
    (reply,) = replies
    whole = write(request, replies)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    final = "response.incomplete" if reply.finish == "length" else "response.completed"
    plain: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(whole["output"]):
        plain += _item_events(index, item)
    plain.append((final, {"response": whole}))
    for number, (name, fields) in enumerate(plain):
        yield Event({"type": name, "sequence_number": number, **fields}, name)


# -- checking ------------------------------------------------------------------------------------------------------------


def _check_stored(body: Mapping[str, Any]) -> None:
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise RequestError(
                400,
                f"{name} is not served, since nothing is stored; send the whole conversation as input",
                "unsupported_field",
            )


def _check_text(text: Any) -> None:
    """Refuse an output that must have a form. Raises RequestError."""
    form = text.get("format") if isinstance(text, dict) else text
    if form not in (None, {"type": "text"}):
        raise RequestError(400, f"text = {text!r:.60} is not served; leave it out", "unsupported_value")


# -- reading -------------------------------------------------------------------------------------------------------------


def _conversation(value: Any) -> list[Any]:
    """Items as messages in the form of Chat Completions. Successive items of the assistant are one turn."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError(400, f"input must be text or a list of items, found {value!r:.60}")
    messages: list[Any] = []
    turn: Message | None = None
    for item in value:
        if not isinstance(item, dict):
            raise RequestError(400, f"an item of input must be an object, found {item!r:.60}")
        kind = item.get("type", "message")
        if kind == "function_call_output":
            turn = None
            output = item.get("output")
            content = [_part(p) for p in output] if isinstance(output, list) else output
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append({"role": item.get("role"), "content": _content(item)})
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, item, kind)
    return messages


def _add_to_turn(turn: Message, item: Mapping[str, Any], kind: str) -> None:
    if kind == "message":
        content = _content(item)
        turn["content"] += (
            content
            if isinstance(content, str)
            else "".join(str(p.get("text") or p.get("refusal") or "") for p in content)
        )
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "reasoning":
        texts = [str(p.get("text") or "") for p in item.get("content") or () if isinstance(p, dict)]
        if any(texts):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(texts)
    else:
        raise RequestError(400, f"items of type {kind!r:.60} are not served")


def _content(item: Mapping[str, Any]) -> Any:
    content = item.get("content")
    return [_part(p) for p in content] if isinstance(content, list) else content


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _PARTS:
        return {"type": _PARTS[kind], _PARTS[kind]: part.get(_PARTS[kind])}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise RequestError(400, f"content parts of type {kind!r:.60} are not served; send text, or images as data URLs")


# -- writing -------------------------------------------------------------------------------------------------------------


def _head(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": request.calls_allowed != 1,
        "temperature": None,
        "top_p": None,
        "tool_choice": "none" if request.calls_allowed == 0 else "auto",
        "tools": [{"type": "function", "strict": False, **t["function"]} for t in request.tools],
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"id": f"rs_{reply.number}", "type": "reasoning", "summary": [], "content": content})
    if reply.text or not reply.calls:
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "status": status, "content": [text]}
        )
    for call in reply.calls:
        named = {"call_id": call.id, "name": call.name, "arguments": arguments_text(call)}
        items.append({"id": f"fc_{call.id}", "type": "function_call", "status": status, **named})
    return items


def _returned(reply: Reply) -> Message:
    message: Message = _conversation(_items(replace(reply, reasoning="")))[0]
    return message


def _item_events(index: int, item: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    place = {"output_index": index, "item_id": item["id"]}
    events: list[tuple[str, dict[str, Any]]] = []
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        begun["arguments"] = ""
        text = item["arguments"]
        events.append(("response.function_call_arguments.delta", {**place, "delta": text}))
        events.append(("response.function_call_arguments.done", {**place, "arguments": text, "name": item["name"]}))
    elif item["type"] == "message":
        begun["content"] = []
        (part,) = item["content"]
        place["content_index"] = 0
        text = part["text"]
        events.append(("response.content_part.added", {**place, "part": {**part, "text": ""}}))
        events.append(("response.output_text.delta", {**place, "delta": text, "logprobs": []}))
        events.append(("response.output_text.done", {**place, "text": text, "logprobs": []}))
        events.append(("response.content_part.done", {**place, "part": part}))
    else:
        begun = {**item, "content": []}
    added = ("response.output_item.added", {"output_index": index, "item": begun})
    return [added, *events, ("response.output_item.done", {"output_index": index, "item": item})]


RESPONSES = Protocol("responses", read, write, events, error, _returned)
