"""JSON values one after another in a text that is not JSON as a whole."""

from __future__ import annotations

import json
from typing import Any

from agentrl.types import ParseError

_DECODER = json.JSONDecoder(strict=False)


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
