"""How people name what is theirs: `file.py:Object` or `package.module:Object`, with `=WEIGHT` behind it; `data.jsonl@[a:b]`.

The path of a file may hold any character.
"""

from __future__ import annotations

import re

_OBJECT = re.compile(r"(.*\.py)(?::(.*))?", re.DOTALL)
_SLICE = re.compile(r"(.*?)(@\[\d*:\d*\])?", re.DOTALL)
_WEIGHT = re.compile(r"(.*\.py(?::[^=]*)?)(?:=(.*))?", re.DOTALL)


def split_object(name: str) -> tuple[str, str]:
    """The file or module, and the object in it; empty: none is named."""
    found = _OBJECT.fullmatch(name)
    where, attribute = found.groups("") if found else name.partition(":")[::2]
    return where, attribute


def split_weight(name: str) -> tuple[str, str]:
    """The name, and the weight behind it; empty: none is given."""
    found = _WEIGHT.fullmatch(name)
    spec, weight = found.groups("") if found else name.partition("=")[::2]
    return spec, weight


def split_slice(name: str) -> tuple[str, str]:
    """The file, and `@[a:b]`; empty: the whole file."""
    path, part = _SLICE.fullmatch(name).groups("")  # type: ignore[union-attr]  # it matches everything
    return path, part
