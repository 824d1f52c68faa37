"""Child processes that end with their parent, also when the parent is killed, and the ending of whole sessions of processes (Linux).

A Python process of agentrl calls `exit_with_parent`. Any other program is started by the command `killed_with_parent(command)`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

POLL_S = 0.5
_EXEC = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}); os.execvp(sys.argv[1], sys.argv[1:])"
)


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap a command in a small program that sets PR_SET_PDEATHSIG and then executes it: the kernel kills it with its parent.

    The parent is the *thread* that starts the command. A function run between fork and exec could deadlock, hence the program.
    """
    return [sys.executable, "-ISc", _EXEC, *command]


def exit_with_parent(parent: int, grace_s: float = 0.0) -> None:
    """Start a daemon thread that ends this process `grace_s` seconds after the process `parent` is gone, whatever it is doing."""
    threading.Thread(target=_watch, args=(parent, grace_s), daemon=True).start()


def exit_now() -> NoReturn:
    """End this process without cleanup, and the processes it started if it leads a process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def process_exists(pid: int) -> bool:
    """Whether there is a process with this id, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def session_members(session: int) -> list[int]:
    """Return the processes of a session, except zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry.name))
    return members


def signal_session(session: int, number: int) -> None:
    """Send a signal to all processes of a session."""
    for pid in session_members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _watch(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(grace_s)
    exit_now()
