"""Whether a file of records is being written just now: its writer holds a lock on it, which ends with the writer, however it ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO


def hold(file: BinaryIO) -> bool:
    """Lock a file until it is closed; False if another writer has it. Where a file system knows no locks, nobody is told."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_held(path: Path) -> bool:
    """Has a writer, in any process, this file open?"""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
