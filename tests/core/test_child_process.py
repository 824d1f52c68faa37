"""Children end with a parent that is killed, and so does what they started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import read_line

from agentrl.core.child_process import killed_with_parent, session_members, signal_session

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(300)"]
WATCHED = """
import os, subprocess, sys, time
from agentrl.core.child_process import exit_with_parent
exit_with_parent(os.getppid())
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("up", flush=True)
time.sleep(300)
"""
PARENT = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"


def wait_until(condition, within_s=30):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("child", [killed_with_parent(SLEEP), [sys.executable, "-c", WATCHED]], ids=["kernel", "watch"])
def test_a_child_of_a_killed_parent_ends_with_what_it_started(child):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert read_line(parent) == "up\n"
    children = [int(p) for p in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(children) == 1
    assert session_members(children[0])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not session_members(children[0]))


def test_a_signal_reaches_all_processes_of_a_session():
    script = f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(300)"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    assert read_line(leader) == "up\n"
    assert len(session_members(leader.pid)) == 2
    assert os.getpid() not in session_members(leader.pid)
    signal_session(leader.pid, signal.SIGTERM)
    leader.wait()
    leader.stdout.close()
    wait_until(lambda: not session_members(leader.pid))
