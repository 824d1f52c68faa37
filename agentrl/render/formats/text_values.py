"""Arguments that a format writes as text (Qwen3-Coder, Qwen3.5, GLM), decoded by the tool's JSON schema.

Templates write a string as it is and every other value as JSON, or as Python writes it (`None`, `True`). The text alone does not tell the
string `5` from the number 5; the schema does:

    the schema allows no string       the value that the text is, if the schema allows it; any list and any object
    the schema allows only strings    the text
    the schema allows both            the value if the text is exactly how a template writes it (`5`, `null`, `None`; not `1.50`); any
                                      list and any object that the schema allows; else the text

A text that is no such value stays text, and the tool's validation reports it to the policy. What JSON schemas say beyond types, enums and
structure (patterns, bounds) is left to that validation.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.render.formats.json_calls import as_json, is_writable, read_json
from agentrl.types import Action, ParseError, ToolCall

_PYTHON = {"None": None, "True": True, "False": False}
_MAX_PYTHON_CHARACTERS = 100_000
_MAX_CHECKED_DEPTH = 6
"""deeper parts of a value are not compared with the schema"""
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,), "array": (list,), "object": (dict,),
}  # fmt: skip
_MISSING = object()


def decode_calls(action: Action, tools: Sequence[Mapping[str, Any]]) -> Action:
    """The action with the arguments of its calls decoded. Calls of tools without a schema are unchanged."""
    schemas = {f.get("name"): f.get("parameters") for f in (t.get("function", t) for t in tools)}
    calls = tuple(_decode_call(c, schemas.get(c.name)) for c in action.calls)
    return replace(action, calls=calls) if calls != action.calls else action


def _decode_call(call: ToolCall, schema: Any) -> ToolCall:
    if not isinstance(schema, Mapping):
        return call
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    properties = properties if isinstance(properties, Mapping) else {}
    decoded = {
        key: decode_text(value, properties.get(key, others), schema) if isinstance(value, str) else value
        for key, value in call.arguments.items()
    }
    return replace(call, arguments=decoded)


def decode_text(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """The value that a text stands for.

    Args:
        text: The argument as the policy wrote it.
        schema: The parameter's JSON schema. Without one (None, False) the text is the value.
        root: The schema that holds the definitions to which `schema` refers. None: itself.

    Example:
        >>> decode_text("[1, 2]", {"type": "array"}), decode_text("02134", {"type": "string"})
        ([1, 2], '02134')
    """
    if schema is None or schema is False:
        return text
    root = root if root is not None else schema if isinstance(schema, Mapping) else {}
    text_allowed = _allows(schema, text, root)
    value = _value_of(text)
    if value is _MISSING or isinstance(value, str):
        return text
    if isinstance(value, (list, dict)) and (not text_allowed or _allows(schema, value, root)):
        return value
    if not _allows(schema, value, root) or (text_allowed and not _is_canonical(text, value)):
        return text
    return value


def _value_of(text: str) -> Any:
    """The value that a text is in JSON, or else in Python."""
    stripped = text.strip()
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    value = read_json(stripped)
    if isinstance(value, ParseError):
        value = _python_value(stripped)
    return value if is_writable(value) else _MISSING


def _python_value(text: str) -> Any:
    """The list, tuple or dict that a text is in Python."""
    if not text.startswith(("[", "{", "(")) or len(text) > _MAX_PYTHON_CHARACTERS:
        return _MISSING
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # for escapes that Python does not know
            value = as_json(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _MISSING
    return value if isinstance(value, (list, dict)) else _MISSING


def _is_canonical(text: str, value: Any) -> bool:
    """Whether a template writes this value as this text."""
    return text in (json.dumps(value), str(value))


def _allows(schema: Any, value: Any, root: Mapping[str, Any], depth: int = 0, steps: int = 0) -> bool:
    """Whether a JSON schema allows a value: its types, enums and structure. `steps`: references and unions followed since the last part."""
    if depth > _MAX_CHECKED_DEPTH or not isinstance(schema, Mapping):
        return schema is not False
    if steps > _MAX_CHECKED_DEPTH:
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and not _allows(_resolve(reference, root), value, root, depth, steps + 1):
        return False
    if not _has_type(schema.get("type"), value):
        return False
    if "enum" in schema and not any(_equal(e, value) for e in _list(schema["enum"])):
        return False
    if "const" in schema and not _equal(schema["const"], value):
        return False
    for key, combine in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if key in schema and not combine(_allows(s, value, root, depth, steps + 1) for s in _list(schema[key])):
            return False
    if isinstance(value, list):
        return _allows_items(schema, value, root, depth + 1)
    return not isinstance(value, dict) or _allows_properties(schema, value, root, depth + 1)


def _allows_items(schema: Mapping[str, Any], value: list[Any], root: Mapping[str, Any], depth: int) -> bool:
    prefix = _list(schema.get("prefixItems", []))
    schemas = [*prefix[: len(value)], *[schema.get("items")] * (len(value) - len(prefix))]
    return all(_allows(s, v, root, depth) for s, v in zip(schemas, value, strict=True))


def _allows_properties(schema: Mapping[str, Any], value: dict[str, Any], root: Mapping[str, Any], depth: int) -> bool:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties")
    return all(r in value for r in _list(schema.get("required", []))) and all(
        _allows(properties.get(k, others), v, root, depth) for k, v in value.items()
    )


def _has_type(declared: Any, value: Any) -> bool:
    names = [declared] if isinstance(declared, str) else _list(declared)
    if not names:
        return True
    return any(
        isinstance(value, _TYPES.get(n, (object,))) and not (isinstance(value, bool) and n in ("integer", "number"))
        for n in names
        if isinstance(n, str)
    )


def _equal(a: Any, b: Any) -> bool:
    """Equality in JSON, where True is not 1."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that `#/…` names. Everything is allowed where there is none."""
    part: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        part = part.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
