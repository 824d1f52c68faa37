"""Locks that mark a file as being written. A lock ends with the process that holds it, however the process ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO


def try_lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed. False if another writer holds the lock; True on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return not isinstance(e, BlockingIOError)
    return True


def is_locked(path: Path) -> bool:
    """True if a writer, in any process, holds the lock of a file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as e:
            return isinstance(e, BlockingIOError)
    return False
