"""One episode as a single HTML file, to attach to a bug report. It makes no network request and runs only the scripts it embeds."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from agentrl.store import encode
from agentrl.view.page_server import asset

_POLICY = (
    "default-src 'none'; img-src data:; script-src {scripts}; style-src {style}; base-uri 'none'; form-action 'none'"
)
_START = "AR.single();"
# Characters that can end a script element, and those that older JavaScript reads as line ends.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_of(detail: Mapping[str, Any]) -> str:
    """Return the page of an episode (see episode_detail.py)."""
    style, script = asset("style.css").decode(), asset("tokens.js").decode()
    data = encode(detail).decode().strip()
    for character, escape in _ESCAPES.items():
        data = data.replace(character, escape)
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in str(detail["episode_id"]))
    return (
        asset("episode.html")
        .decode()
        .format(
            title=f"episode {name}",
            style=style,
            policy=_POLICY.format(style=_hash(style), scripts=f"{_hash(script)} {_hash(_START)}"),
            data=data,
            script=script,
            start=_START,
        )
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
