"""Processes that tests start: their signals and output, and what a test leaves behind.

That is zombies, which nobody waited for, and at the end of the session whatever still runs. A process is recognised by MARK in the environment
that it inherited; PYTEST_CURRENT_TEST beside it is the test that started it.
"""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from agentrl.core.child_process import children_of

MARK = "AGENTRL_TEST_SESSION"
HELPERS = ("resource_tracker", "torch_shm_manager")
"""processes of multiprocessing and torch, which end with this one"""
GRACE_S = 10.0
"""How long a child that has ended may wait to be reaped, for example by a thread of asyncio; and a stray process, to end."""


def heed_interrupts() -> None:
    """For `preexec_fn`: a program started by a shell's background job inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_line(process: subprocess.Popen, timeout_s: float = 60.0) -> str:
    """The next line of its output. A process that prints none in time is killed, which ends its output."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def zombies() -> set[int]:
    """The children of this process that have ended and that nobody waited for."""
    return {pid for pid in children_of(os.getpid()) if _state(pid) == "Z"}


def lasting_zombies(before: set[int]) -> set[int]:
    """The zombies that are new since `before` and still there after a grace."""
    deadline = time.monotonic() + GRACE_S
    while (new := zombies() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return new


def strays(session: str) -> dict[int, str]:
    """The processes that tests of this session started and that still run after a grace: the test of each."""
    deadline = time.monotonic() + GRACE_S
    while (running := _started_in(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running


def _started_in(session: str) -> dict[int, str]:
    running = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or is another user's
            pairs = (pair.partition("=") for pair in (entry / "environ").read_text(errors="replace").split("\0"))
            environment = {name: value for name, _, value in pairs}
            command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            if environment.get(MARK) == session and not any(helper in command for helper in HELPERS):
                running[int(entry.name)] = f"{environment.get('PYTEST_CURRENT_TEST', 'no test')}: {command[:200]}"
    return running


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
