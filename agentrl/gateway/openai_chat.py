"""OpenAI Chat Completions. Form: the types of the package openai, `openai.types.chat`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway.known_requests import KnownRequests, to_json
from agentrl.gateway.protocol import (
    MAX_CHOICES,
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
from agentrl.types import ToolCall

OVERRIDDEN = (
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty reasoning_effort verbosity"
).split()
"""parameters of sampling; the run's own apply, and the client's are recorded"""
_SERVED = frozenset(
    (
        *OVERRIDDEN,
        *"model messages tools tool_choice parallel_tool_calls max_tokens max_completion_tokens stop n stream".split(),
        *"stream_options user metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier".split(),
    )
)
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 503: "server_error"}


def read(body: Mapping[str, Any], known: KnownRequests) -> ModelRequest:
    """A request body. Raises RequestError where it asks for what is not served."""
    check_fields(body, _SERVED, _NEUTRAL)
    n = read_number(body, "n", 1) or 1
    if n > MAX_CHOICES:
        raise RequestError(400, f"n must be at most {MAX_CHOICES}, found {n}")
    limit = read_number(body, "max_completion_tokens", read_number(body, "max_tokens", None))
    options = body.get("stream_options")
    conversation = read_messages(body.get("messages"), known)
    return ModelRequest(
        protocol="chat",
        model=read_model(body),
        messages=conversation.messages,
        paths=conversation.paths,
        tools=read_tools(body.get("tools")),
        max_tokens=limit,
        stop=read_stop(body.get("stop"), "stop"),
        n=n,
        stream=body.get("stream") is True,
        calls_allowed=read_tool_choice(body),
        overridden=read_overridden(body, OVERRIDDEN),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def read_tool_choice(body: Mapping[str, Any]) -> int | None:
    """Maximum number of calls in the reply; None: the run's. A call that is required is not forced: the policy samples freely."""
    if body.get("tool_choice") == "none":
        return 0
    return 1 if body.get("parallel_tool_calls") is False else None


def read_overridden(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What the client wanted of sampling and does not get, for the record."""
    overridden = {name: body[name] for name in names if body.get(name) is not None}
    choice = body.get("tool_choice")
    return overridden if choice in (None, "auto", "none") else {**overridden, "tool_choice": choice}


def write(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    """The answer as one object."""
    choices = [
        {"index": i, "message": _message(r), "finish_reason": r.finish, "logprobs": None} for i, r in enumerate(replies)
    ]
    return {**_head(request, replies, "chat.completion"), "choices": choices, "usage": _usage(replies)}


def events(request: ModelRequest, replies: Sequence[Reply]) -> Iterator[Event]:
    """The answer as chunks."""
    head = _head(request, replies, "chat.completion.chunk")

    def chunk(index: int, delta: Mapping[str, Any], finish: str | None = None) -> Event:
        return Event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}]})

    for index, reply in enumerate(replies):
        yield chunk(index, {"role": "assistant", "content": "" if reply.text else None})
        if reply.reasoning:
            yield chunk(index, {"reasoning_content": reply.reasoning})
        if reply.text:
            yield chunk(index, {"content": reply.text})
        for number, call in enumerate(reply.calls):
            begun = _call(call)
            arguments = begun["function"]["arguments"]
            begun["function"]["arguments"] = ""
            yield chunk(index, {"tool_calls": [{"index": number, **begun}]})
            yield chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
        yield chunk(index, {}, reply.finish)
    if request.include_usage:
        yield Event({**head, "choices": [], "usage": _usage(replies)})
    yield Event("[DONE]")


def error(failure: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(failure.status, "invalid_request_error")
    return {"error": {"message": failure.message, "type": kind, "param": None, "code": failure.code}}


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as JSON text."""
    return to_json(call.arguments).decode()


def _message(reply: Reply) -> dict[str, Any]:
    message = _returned(reply)
    return {**message, "reasoning_content": reply.reasoning} if reply.reasoning else message


def _returned(reply: Reply) -> dict[str, Any]:
    """The message in the key order of openai's types, in which that package sends it back."""
    content = reply.text or (None if reply.calls else "")
    message: dict[str, Any] = {"content": content, "refusal": None, "role": "assistant"}
    if reply.calls:
        message["tool_calls"] = [_call(c) for c in reply.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"arguments": arguments_text(call), "name": call.name}, "type": "function"}


def _head(request: ModelRequest, replies: Sequence[Reply], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{replies[0].number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    prompt, completion = replies[0].prompt_tokens, sum(r.completion_tokens for r in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


CHAT = Protocol("chat", read, write, events, error, _returned)
