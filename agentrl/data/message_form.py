"""One form for conversations and tools, however a data file writes them.

A message has a known role and a content that is text (or parts, where there are images). A call is
`{"type": "function", "id", "function": {"name", "arguments": {…}}}`, its arguments an object. A tool's message has the name and the id of
the call that it answers. A key whose value is null is absent. Tools are a list of `{"type": "function", "function": {…}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from agentrl.core.message_images import is_image
from agentrl.errors import DataError, suggest
from agentrl.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
"""roles of messages in data files"""
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool", "ipython": "tool"}
"""names of roles in other layouts (ShareGPT, the first OpenAI function calls, GLM, Llama 3)"""
_TEXT_PARTS = ("text", "input_text", "output_text")


def normal_messages(value: Any, *, arrow: bool = False, before: Sequence[Message] = ()) -> tuple[Message, ...]:
    """Return the messages of a data row in the normal form.

    Args:
        value: A list of messages with `role` and `content`, or with ShareGPT's `from` and `value`.
        arrow: The row was read from Parquet or Arrow, which fill the missing keys of every object with null, those of arguments too.
        before: The messages before these, in the normal form; they are not returned.

    Raises:
        DataError: the value is not a conversation; the message says where.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"expected a list of messages with role and content, found {_found(value)}")
    messages = list(before)
    for number, item in enumerate(value, len(before)):
        try:
            message = _message(item, messages, arrow)
            if message["role"] == "tool":
                _name_result(message, messages)
        except DataError as e:
            raise DataError(f"message {number}: {e}") from e
        messages.append(message)
    return tuple(messages[len(before) :])


def normal_tools(value: Any, *, arrow: bool = False) -> list[dict[str, Any]]:
    """Return the tools of a data row as a list of schemas. The value may be JSON text; null and empty text are no tools.

    Raises:
        DataError: the value is not a list of tools.
    """
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else []
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise DataError(f"tools must be a list of tools or its JSON text, found {_found(value)}")
    return [_tool(item, f"tools[{number}]", arrow) for number, item in enumerate(value)]


def without_nulls(value: Any) -> Any:
    """A copy of a value without the keys that are null, at any depth."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(v) for v in value]
    return value


def _tool(item: Any, where: str, arrow: bool) -> dict[str, Any]:
    if isinstance(item, str):
        item = _parsed(item, where)
    if arrow:
        item = without_nulls(item)
    if not isinstance(item, Mapping):
        raise DataError(f"{where} must be an object, found {_found(item)}")
    function = item.get("function", item)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f'{where} must be {{"type": "function", "function": {{"name", …}}}}, found {_found(item)}')
    if function is item:
        function, item = {k: v for k, v in item.items() if k != "type"}, {"type": "function"}
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": _parsed(function["parameters"], f"{where}.function.parameters")}
    return {**item, "type": item.get("type") or "function", "function": dict(function)}


def _message(item: Any, earlier: Sequence[Message], arrow: bool) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"expected an object with role and content, found {_found(item)}")
    message = {k: v for k, v in item.items() if v is not None}
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    message["role"] = _role(message.get("role"))
    if "function_call" in message:
        call = message.pop("function_call")
        message.setdefault("tool_calls", [call])
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = _parsed(message["tool_calls"], "tool_calls")
    calls = message.pop("tool_calls", None)
    if calls:
        if message["role"] != "assistant":
            raise DataError(f"tool_calls in a message of role {message['role']!r}; only the assistant calls tools")
        if not isinstance(calls, (list, tuple)):
            raise DataError(f"tool_calls must be a list, found {_found(calls)}")
        message["tool_calls"] = [
            _call(call, f"tool_calls[{number}]", earlier, number, arrow) for number, call in enumerate(calls)
        ]
    for key in ("reasoning_content", "thinking", "reasoning", "name", "tool_call_id"):
        if key in message and not isinstance(message[key], str):
            raise DataError(f"{key} must be text, found {_found(message[key])}")
    reasoning = [message.pop(k) for k in ("reasoning_content", "thinking", "reasoning") if k in message]
    if any(reasoning) and message["role"] == "assistant":  # templates read one key or the other
        message["reasoning_content"] = message["thinking"] = next(filter(None, reasoning))
    message["content"] = _content(message, arrow)
    return message


def _role(role: Any) -> str:
    if not isinstance(role, str):
        raise DataError(f"expected a role and content, found role {_found(role)}")
    name = _OTHER_NAMES.get(role, role)
    if name not in ROLES:
        raise DataError(f"unknown role {role!r:.60}{suggest(role[:60], ROLES)}; roles are {', '.join(ROLES)}")
    return name


def _content(message: Message, arrow: bool) -> str | list[Any]:
    content = message.get("content")
    if content is None:
        if message["role"] == "tool" or any(message.get(k) for k in ("tool_calls", "reasoning_content", "thinking")):
            return ""
        raise DataError(f"a message of role {message['role']!r} needs content, found null or no such key")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise DataError(f"content must be text or a list of parts, found {_found(content)}")
    parts = [_part(part, f"content[{number}]") for number, part in enumerate(content)]
    return parts if any(map(is_image, parts)) else "".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, Mapping):
        part = {k: v for k, v in part.items() if v is not None}
        if is_image(part):
            return dict(part)
        if part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
            return {**part, "type": "text"}
    raise DataError(f'{where} must be {{"type": "text", "text": …}} or an image, found {_found(part)}')


def _call(call: Any, where: str, earlier: Sequence[Message], number: int, arrow: bool) -> dict[str, Any]:
    if isinstance(call, str):
        call = _parsed(call, where)
    if not isinstance(call, Mapping):
        raise DataError(f"{where} must be an object, found {_found(call)}")
    call = {k: v for k, v in call.items() if v is not None}
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{where} must name its function, found {_found(call)}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.function.arguments") if arguments.strip() else {}
    elif arrow:
        arguments = without_nulls(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}.function.arguments must be an object or its JSON text, found {_found(arguments)}")
    call_id = call.get("id") or f"functions.{function['name']}:{len(_calls(earlier)) + number}"
    if not isinstance(call_id, str):
        raise DataError(f"{where}.id must be text, found {_found(call_id)}")
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _calls(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The calls of all messages, in order."""
    return [call for message in messages for call in message.get("tool_calls", ())]


def _name_result(message: Message, earlier: Sequence[Message]) -> None:
    """Complete a tool's message by the call that it answers: by its id, else by its name, else the first call without an answer."""
    call_id, name = message.get("tool_call_id"), message.get("name")
    match: Mapping[str, Any] | None
    if call_id is not None:
        newest = (c for m in reversed(earlier) for c in reversed(m.get("tool_calls", ())))
        match = next((c for c in newest if c["id"] == call_id), None)
        if match is None and _calls(earlier):
            raise DataError(f"tool_call_id {call_id!r:.60} is not the id of an earlier call")
    else:
        answered = {m.get("tool_call_id") for m in earlier if m["role"] == "tool"}
        open_calls = [c for c in _calls(earlier) if c["id"] not in answered]
        match = next((c for c in open_calls if name in (None, c["function"]["name"])), None)
        if match is None and open_calls:
            raise DataError(f"no call without an answer has the name {name!r:.60}")
    if match is not None:
        message.setdefault("tool_call_id", match["id"])
        message.setdefault("name", match["function"]["name"])


def _parsed(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where} is text that is not JSON: {e}: {text!r:.60}") from e


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _found(value: Any) -> str:
    return f"{type(value).__name__}: {value!r:.60}"
