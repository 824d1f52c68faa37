"""Child processes that end with their parent, also when the parent is killed, and the ending of whole sessions of processes (Linux).

A Python process of agentrl calls `exit_with_parent`. Any other program is started by the command `killed_with_parent(command)`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

POLL_S = 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap a command in a small program (keeper_process.py) that runs it and kills it, and what it started, when this process ends.

    Start it with `start_new_session=True`, and from a thread that lives as long as the command may: the kernel reports the end of the *thread*.
    """
    return [sys.executable, "-ISc", _keeper(), str(os.getpid()), *command]


@cache
def _keeper() -> str:
    return Path(__file__).with_name("keeper_process.py").read_text(encoding="utf-8")


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


def how_it_ended(code: int | None) -> str:
    """Describe the end of a process by its exit code; None: it closed its connection."""
    if code is None:
        return "closed its connection"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, zombies included."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            children += map(int, file.read_text().split())
    return children


def kill_children(pid: int, keep: Collection[int] = ()) -> None:
    """Kill the children of this process or of another one, except `keep`; the children of zombies are gone already."""
    for child in children_of(pid):
        if child not in keep:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process the parent of its descendants whose parents end, so that none of them escapes its supervision."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


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
