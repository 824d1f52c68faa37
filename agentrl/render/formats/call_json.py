"""Calls as JSON: reading them as policies write them, and saying what is wrong with them. Nothing here raises."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.types import Action, ParseError

Read = tuple[str, dict[str, Any], str | None] | ParseError
"""(name, arguments, id or None) of one call, or what is wrong with it"""
SURROGATE = re.compile("[\ud800-\udfff]")
DEEPEST = 200
"""objects and lists in one another; orjson writes up to 254, with what stands around a call"""
_DECODER = json.JSONDecoder(strict=False)
_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def read_json(text: str) -> Any:
    """JSON as policies write it (raw newlines in strings are accepted), or a ParseError."""
    try:
        value = _READER.decode(text)
    except RecursionError:
        return ParseError("content", "the call is nested too deeply", text)
    except ValueError as e:
        return ParseError("content", f"the call is not JSON: {e}", text)
    return value


def _depth(value: Any) -> int:
    """How many objects and lists stand in one another."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, (dict, list))]:
        depth += 1
        level = [v for outer in level for v in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def read_arguments(name: str, value: Any, text: str, call_id: str | None = None) -> Read:
    """Arguments (an object, or one written as a string) as a call of `name`."""
    if isinstance(value, str):
        inner = read_json(value)
        value = value if isinstance(inner, ParseError) else inner
    if not isinstance(value, dict):
        return ParseError(
            "content",
            f"arguments of {name[:80]!r} must be an object, found {'none' if value is None else type(value).__name__}",
            text,
        )
    if _depth(value) > DEEPEST:
        return ParseError("content", "the call is nested too deeply", text)
    if not name.strip():
        return ParseError("content", "the call has no name", text)
    flaw = _flaw([name, call_id, value])
    return ParseError("content", flaw, text) if flaw else (name.strip(), value, call_id)


def read_call(body: str) -> Read:
    """`{"name": …, "arguments": {…}}` (or `parameters`)."""
    value = read_json(body)
    return value if isinstance(value, ParseError) else call_of(value, body)


def call_of(value: Any, text: str) -> Read:
    """The call that a JSON value says, or what is wrong with it."""
    if not isinstance(value, dict):
        return ParseError(
            "content", f"the call must be an object with name and arguments, found {type(value).__name__}", text
        )
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ParseError("content", "the call has no name", text)
    call_id = value.get("id")
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return read_arguments(name, arguments, text, call_id if isinstance(call_id, str) and call_id else None)


def as_tool_calls(action: Action) -> list[dict[str, Any]]:
    """The calls as chat templates take them."""
    return [
        {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in action.calls
    ]


def split_values(text: str, separator: str) -> list[tuple[Any, str] | ParseError]:
    """(value, its text) for values separated by `separator`; the first fault ends the reading, as an error at its place."""
    found: list[tuple[Any, str] | ParseError] = []
    at, n = _skip(text, 0), len(text)
    while at < n:
        try:
            value, end = _DECODER.raw_decode(text, at)
            json.dumps(value, allow_nan=False)
        except RecursionError:
            return [*found, ParseError("content", "the call is nested too deeply", text[at:])]
        except ValueError as e:
            return [*found, ParseError("content", f"the call is not JSON: {e}", text[at:])]
        found.append((value, text[at:end]))
        at = _skip(text, end)
        if at < n:
            if not text.startswith(separator, at):
                return [
                    *found,
                    ParseError(
                        "structure",
                        f"expected {separator!r} between two calls, found {text[at : at + 20]!r}",
                        text[at:],
                    ),
                ]
            at = _skip(text, at + len(separator))
    return found or [ParseError("structure", "expected a call, found nothing", text)]


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_READER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def _flaw(value: Any) -> str | None:
    """Why a value cannot be written as JSON in UTF-8; None: it can."""
    try:
        _WRITER.encode(value).encode()
    except UnicodeEncodeError:
        return "the call holds half of a surrogate pair, which is no character"
    except RecursionError:
        return "the call is nested too deeply"
    except (ValueError, TypeError):
        return "the call holds a value that JSON has not"
    return None
