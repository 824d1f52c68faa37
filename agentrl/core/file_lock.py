"""Locks that mark a file as being written. A lock ends with the process that took it, however the process ends.

A lock belongs to an open file, which a forked child shares with its parent. So that a child of user code cannot keep the lock of a run that
was killed, each forked child gives up its copies: its descriptors of locked files point to /dev/null.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LOOK_S, POLL_S = 0.5, 0.005
"""How long `try_lock` tries: `is_locked` itself holds a lock for a moment while it looks."""
_locked: weakref.WeakSet[BinaryIO] = weakref.WeakSet()
"""open files whose lock this process holds"""


def _take(file: BinaryIO | int, within_s: float) -> bool:
    """Take the lock of an open file or folder; False if another process holds it for `within_s` seconds.

    Raises:
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)


def try_lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed. False if another writer holds the lock; True on a file system without locks."""
    try:
        taken = _take(file, LOOK_S)
    except OSError:
        return True
    if taken:
        _locked.add(file)
    return taken


def is_locked(path: Path) -> bool:
    """True if a writer, in any process, holds the lock of a file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as e:
            return isinstance(e, BlockingIOError)
    return False


@contextmanager
def locked_folder(folder: Path, timeout_s: float = 30.0) -> Iterator[None]:
    """Keep other processes that use this function out of a folder. One that keeps it longer than `timeout_s` is not waited for: it hangs."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            _take(descriptor, timeout_s)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor too
        os.close(descriptor)


def _give_up_locks() -> None:
    """Called in a forked child. Only the parent writes; closing the descriptors instead would free their numbers for other files."""
    held = [file for file in _locked if not file.closed]
    if held:
        null = os.open(os.devnull, os.O_RDWR)
        for file in held:
            os.dup2(null, file.fileno(), inheritable=False)
        os.close(null)
    _locked.clear()


os.register_at_fork(after_in_child=_give_up_locks)
