"""Files that SGLang servers leave in shared memory. SGLang removes none of them when it is killed, and servers end by being killed.

A file of a living process is mapped by it, as /proc/PID/maps shows. Most names, as those of semaphores, do not say which program made them, so a
journal in shared memory names those of each server. It is locked while the process that started the server lives; if that was killed, the next start
removes the files that the journal names and no process maps. Files of other programs are left alone.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from agentrl.core.file_lock import is_locked, locked_folder, try_lock

MEMORY = Path("/dev/shm")
UNMAPPED_S = 5.0
"""age of a file that no process maps at which its server is gone: a young one may be about to be mapped"""
_LOADS = "sglang_loads_*"
"""the load of a server, in managers/load_snapshot.py of SGLang; no process id is in the name"""
_JOURNAL = "agentrl-mapped-"


class Journal:
    """The files of one server, for the next start if this process is killed."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def write(self, files: Iterable[Path]) -> None:
        """Note these files, in place of those before. Without room in shared memory nothing is noted."""
        self.remove()
        with suppress(OSError), locked_folder(MEMORY):  # another start could remove it before it is locked
            self._path = MEMORY / f"{_JOURNAL}{secrets.token_hex(8)}"
            self._file = open(self._path, "xb")  # noqa: SIM115  its lock is held until it is removed
            try_lock(self._file)
            self._file.write(json.dumps({file.name: file.lstat().st_ino for file in files}).encode())
            self._file.flush()

    def remove(self) -> None:
        """Forget the files; idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
        self._path = self._file = None


def mapped_files(pids: Iterable[int]) -> set[Path]:
    """The files in shared memory that processes map, except those in folders, which are weights."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                _, slash, path = line.partition(f"{MEMORY}/")
                if slash and "/" not in path:
                    found.add(MEMORY / path)
    return found


def remove_unmapped(files: Iterable[Path]) -> None:
    """Remove those of the files that no process maps."""
    files = set(files)
    if files:
        for file in files - mapped_files(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            with suppress(OSError):
                file.unlink()


def remove_left_by_killed_servers() -> None:
    """Remove what servers left that ended with a controller that was killed."""
    left = []
    for file in MEMORY.glob(_LOADS):
        with suppress(OSError):
            status = file.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_ctime > UNMAPPED_S:
                left.append(file)
    journals: dict[Path, list[Path]] = {}
    with suppress(OSError), locked_folder(MEMORY):
        journals = {journal: _files_of(journal) for journal in MEMORY.glob(f"{_JOURNAL}*") if _is_left(journal)}
    remove_unmapped([*left, *(file for files in journals.values() for file in files)])
    for journal in journals:
        if not _files_of(journal):  # else a process that is ending maps one; the next start tries again
            journal.unlink(missing_ok=True)


def _is_left(journal: Path) -> bool:
    """Whether a journal is this user's, and the process that wrote it has ended."""
    try:
        return journal.lstat().st_uid == os.getuid() and not is_locked(journal)
    except OSError:
        return False


def _files_of(journal: Path) -> list[Path]:
    """The files that a journal names, as far as they are still the same."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        for name, inode in json.loads(journal.read_bytes()).items():
            file = MEMORY / Path(name).name
            with suppress(OSError):
                status = file.lstat()
                if status.st_ino == inode and status.st_uid == os.getuid():
                    found.append(file)
    return found
