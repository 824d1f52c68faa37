"""The syntax of names on the command line: `file.py:Object`, `package.module:Object`, either with `=WEIGHT`, and `data.jsonl@[a:b]`.

The path of a file may contain any character.
"""

from __future__ import annotations

import re

_ENVS = re.compile(r"([^\s=]+(?: [^\s=]+)*?)=(\d*\.?\d+)(?=\s|$)\s*")
_OBJECT = re.compile(r"(.*\.py)(?::(.*))?", re.DOTALL)
_SLICE = re.compile(r"(.*?)(@\[\d*:\d*\])?", re.DOTALL)
_WEIGHT = re.compile(r"(.*\.py(?::[^=]*)?)(?:=(.*))?", re.DOTALL)


def split_object(name: str) -> tuple[str, str]:
    """Split a name into the file or module and the object, which may be empty."""
    match = _OBJECT.fullmatch(name)
    where, attribute = match.groups("") if match else name.partition(":")[::2]
    return where, attribute


def split_weight(name: str) -> tuple[str, str]:
    """Split off the weight, which may be empty."""
    match = _WEIGHT.fullmatch(name)
    spec, weight = match.groups("") if match else name.partition("=")[::2]
    return spec, weight


def split_slice(name: str) -> tuple[str, str]:
    """Split off the slice `@[a:b]`, which may be empty."""
    path, part = _SLICE.fullmatch(name).groups("")  # type: ignore[union-attr]  # it matches any text
    return path, part


def split_envs(text: str) -> list[tuple[str, float]]:
    """Split `NAME=WEIGHT NAME=WEIGHT …` into names and weights. Any other text, also a single `NAME=WEIGHT`, is one name of weight 1.

    Example:
        >>> split_envs("search_r1=0.7 gymnasium:FrozenLake-v1=0.3")
        [('search_r1', 0.7), ('gymnasium:FrozenLake-v1', 0.3)]
        >>> split_envs("mcp:uvx server --port=5")
        [('mcp:uvx server --port=5', 1.0)]
    """
    pairs = _ENVS.findall(text)
    whole = len(pairs) > 1 and _ENVS.sub("", text).strip() == "" and not any(name.startswith("-") for name, _ in pairs)
    return [(name, float(weight)) for name, weight in pairs] if whole else [(text, 1.0)]
