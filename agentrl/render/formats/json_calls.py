"""Reading and checking calls that policies write as JSON. Nothing here raises: a fault is returned as a `ParseError`.

The messages of these errors are shown to the policy, so changing one changes what is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from agentrl.types import ParseError, ToolCall

ParsedCall = tuple[str, dict[str, Any], str | None] | ParseError
"""name, arguments and id (None: the policy wrote none) of one call, or what is wrong with it"""
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_DEPTH = 200
"""nested objects and lists; orjson writes up to 254, including what surrounds a call in the record"""
_TOO_DEEP = "the call is nested too deeply"
_PREFIX_DECODER = json.JSONDecoder(strict=False)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant)


def read_json(text: str) -> Any:
    """The value of a JSON text in which strings may hold raw newlines, or a ParseError."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        return ParseError("content", _TOO_DEEP, text)
    except ValueError as e:
        return ParseError("content", f"the call is not JSON: {e}", text)


def read_call(text: str) -> ParsedCall:
    """The call in the text `{"name": …, "arguments": {…}}` (or `parameters`)."""
    value = read_json(text)
    return value if isinstance(value, ParseError) else check_call(value, text)


def check_call(value: Any, text: str) -> ParsedCall:
    """The call that a JSON value describes. `text`: its source, for errors."""
    if not isinstance(value, dict):
        return ParseError(
            "content", f"the call must be an object with name and arguments, found {type(value).__name__}", text
        )
    name, call_id = value.get("name"), value.get("id")
    if not isinstance(name, str) or not name.strip():
        return ParseError("content", "the call has no name", text)
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return check_arguments(name, arguments, text, call_id if isinstance(call_id, str) and call_id else None)


def read_arguments(name: str, arguments: str, text: str, call_id: str | None = None) -> ParsedCall:
    """A call of `name` with arguments written as JSON."""
    value = read_json(arguments)
    return value if isinstance(value, ParseError) else check_arguments(name, value, text, call_id)


def check_arguments(name: str, value: Any, text: str, call_id: str | None = None) -> ParsedCall:
    """A call of `name` with these arguments: an object, or a string that holds one as JSON."""
    if isinstance(value, str):
        inner = read_json(value)
        value = value if isinstance(inner, ParseError) else inner
    if not isinstance(value, dict):
        kind = "none" if value is None else type(value).__name__
        return ParseError("content", f"arguments of {name[:80]!r} must be an object, found {kind}", text)
    if _depth(value) > MAX_DEPTH:
        return ParseError("content", _TOO_DEEP, text)
    if not name.strip():
        return ParseError("content", "the call has no name", text)
    flaw = _unwritable([name, call_id, value])
    return ParseError("content", flaw, text) if flaw else (name.strip(), value, call_id)


def as_tool_calls(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Calls as chat templates expect them."""
    return [{"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]


def read_separated_calls(text: str, separator: str) -> list[ParsedCall]:
    """The calls written as JSON objects between separators. The first syntax error ends the reading and is the last item."""
    calls: list[ParsedCall] = []
    at = _skip_spaces(text, 0)
    while at < len(text):
        try:
            value, end = _PREFIX_DECODER.raw_decode(text, at)
            json.dumps(value, allow_nan=False)
        except RecursionError:
            return [*calls, ParseError("content", _TOO_DEEP, text[at:])]
        except ValueError as e:
            return [*calls, ParseError("content", f"the call is not JSON: {e}", text[at:])]
        calls.append(check_call(value, text[at:end]))
        at = _skip_spaces(text, end)
        if at < len(text):
            if not text.startswith(separator, at):
                message = f"expected {separator!r} between two calls, found {text[at : at + 20]!r}"
                return [*calls, ParseError("structure", message, text[at:])]
            at = _skip_spaces(text, at + len(separator))
    return calls or [ParseError("structure", "expected a call, found nothing", text)]


def json_end(text: str, at: int) -> int | None:
    """The end of the JSON object or string that begins at `at`, after spaces. None: there is no whole one."""
    at = _skip_spaces(text, at)
    if text[at : at + 1] not in ("{", '"'):
        return None
    try:
        return _PREFIX_DECODER.raw_decode(text, at)[1]
    except (RecursionError, ValueError):
        return None


def as_json(value: Any) -> Any:
    """A Python literal with lists for tuples, and text for keys that are numbers or constants. Other values without a JSON form remain."""
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    if isinstance(value, dict):
        return {
            json.dumps(k) if k is None or isinstance(k, (bool, int, float)) else k: as_json(v) for k, v in value.items()
        }
    return value


def is_writable(value: Any) -> bool:
    """Whether a value can be an argument of a call."""
    return _depth(value) < MAX_DEPTH and _unwritable(value) is None


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _depth(value: Any) -> int:
    """How deeply objects and lists are nested."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, (dict, list))]:
        depth += 1
        level = [v for outer in level for v in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def _unwritable(value: Any) -> str | None:
    """Why a value cannot be written as JSON in UTF-8, or None if it can."""
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return "the call holds half of a surrogate pair, which is no character"
    except RecursionError:
        return _TOO_DEEP
    except (ValueError, TypeError):
        return "the call holds a value that JSON has not"
    return None
