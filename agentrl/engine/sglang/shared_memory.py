"""Files that SGLang servers leave in shared memory. SGLang removes none of them when it is killed, and servers end by being killed.

A file of a living process is mapped by it, as /proc/PID/maps shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
UNMAPPED_S = 5.0
"""age of a file that no process maps at which its server is gone: a young one may be about to be mapped"""
_LOADS = "sglang_loads_*"
"""the load of a server, in managers/load_snapshot.py of SGLang; no process id is in the name"""


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
    remove_unmapped(left)
