"""Text for the terminal. What a policy, a tool or a server wrote may hold control characters, which a terminal would obey."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from agentrl.core.redaction import redact

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""all control characters except tab and newline; marks that reverse the direction of text; lone surrogates, which cannot be printed"""
_LONG_WORD = re.compile(r"(\S{120})\S{240,}(\S{40})")
"""400 characters and more without a space: a mistake, not a path"""


def printable(text: object) -> str:
    r"""Return a text in which control characters are visible, as escapes: ESC becomes \x1b. Credentials are masked."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], redact(str(text), environment=True))


def with_short_words(text: object) -> str:
    """Return an error's text in which long words, such as a name of thousands of characters, are cut. Credentials are masked before."""
    return _LONG_WORD.sub(r"\1…\2", redact(str(text), environment=True))


def print_now(text: object, file: TextIO | None = None) -> None:
    """Print without buffering, also into a pipe. Control characters are made visible: the text may come from a policy or a server.

    Characters that the terminal's encoding lacks are printed as escapes.
    """
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
