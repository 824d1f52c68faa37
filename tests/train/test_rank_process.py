"""A rank whose controller was killed leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import read_line

RANK = """
import os, subprocess, sys
import time
from agentrl.core.child_process import exit_with_parent
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])  # as megatron keeps one
controller = os.getppid()  # before it can be gone
print(os.getpid(), helper.pid, flush=True)
exit_with_parent(controller)
time.sleep(300)
"""
CONTROLLER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True).wait()
"""


def gone(pid: int) -> bool:
    """It has ended (a zombie has)."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_controller_takes_ranks_and_their_helpers_along():
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, RANK], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    pids = [int(p) for p in read_line(controller).split()]
    try:
        assert len(pids) == 2
        assert not any(map(gone, pids))
        controller.kill()
        controller.wait()
        deadline = time.monotonic() + 20
        while not all(map(gone, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(gone, pids))
    finally:
        controller.stdout.close()
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
