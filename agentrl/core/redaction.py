"""Credentials in text. What is logged, printed or recorded passes `redact`, which masks them.

They are recognised by their form (user and password of an address, tokens in its query, headers), or because a setting or an environment variable
holds them (`remember`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

MASK = "***"
USERINFO = re.compile(r"(?<=://)[^/?#\s\"'<>]+(?=@)")
"""user and password of an address; a password may contain an @"""
_NAMES = (
    r"api[_-]?key|(?:secret|access|private)[_-]?key|secret|token|passwd|password|passphrase|credentials?|authorization"
)
_SECRET_NAME = re.compile(rf"(?:^|[_.\-])(?:{_NAMES}|auth)$", re.IGNORECASE)
QUERY = re.compile(rf"(?<=[?&])((?:[\w-]*[_-])?(?:{_NAMES}|auth|sig|signature)=)([^&#\s\"'<>]+)", re.IGNORECASE)
"""a token in the query of an address: its name with '=', and its value"""
_HEADER = re.compile(
    r"\b(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+|x-api-key['\"]?\s*[:=]\s*['\"]?)[^\s'\",]+",
    re.IGNORECASE,
)
_MIN_LENGTH = 6
"""shorter values are not masked wherever they occur: they are too common as text"""
_MIN_LENGTH_ENV = 8

_of_settings: set[str] = set()
_of_environment: set[str] = set()


def redact(text: str, *, environment: bool = False) -> str:
    """Return a text with `***` in place of credentials.

    Args:
        text: the text.
        environment: mask those of environment variables too. Not in what a policy reads: equal runs must have equal texts.

    Example:
        >>> redact("http://me:hunter2@host:8000/search?api_key=abc does not answer")
        'http://***@host:8000/search?api_key=*** does not answer'
    """
    for value in sorted(_of_settings | _of_environment if environment else _of_settings, key=len, reverse=True):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", MASK, text)
    if "://" in text:
        text = QUERY.sub(rf"\1{MASK}", USERINFO.sub(MASK, text))
    lower = text.lower()
    if text.isascii() and "authorization" not in lower and "x-api-key" not in lower:  # the usual case
        return text
    return _HEADER.sub(rf"\1{MASK}", text)


def remember(value: object) -> None:
    """Mask a value from now on. Of `user:password` the password is masked alone too, also as it is after URL decoding."""
    text = str(value)
    password = text.partition(":")[2]
    _of_settings.update(v for v in (text, password, unquote(password)) if len(v) >= _MIN_LENGTH)


def remember_environment(variables: Mapping[str, str]) -> None:
    """Mask the values of the environment variables whose names say that they are secret."""
    for name, value in variables.items():
        if len(value) >= _MIN_LENGTH_ENV and is_secret_name(name):
            _of_environment.add(value)


def is_secret_name(name: str) -> bool:
    """Whether a name says that its value is secret, as `api_key`, `HF_TOKEN` and `password` do; `input_key` and `max_tokens` do not."""
    return _SECRET_NAME.search(name) is not None
