"""Reading files from folders that others may have made."""

from __future__ import annotations

import os
from pathlib import Path


def read_plain_file(path: Path) -> bytes:
    """Return the contents of a regular file. A symbolic link is not followed: its target could be any file of the reader.

    Raises:
        OSError: it is a link, not a regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
