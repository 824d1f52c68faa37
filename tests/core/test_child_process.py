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
STARTS_ONE = f"""
import multiprocessing, os, subprocess, sys, time
lock = multiprocessing.get_context("spawn").Lock()  # a semaphore, which the resource tracker removes
subprocess.Popen({[sys.executable, "-c", "import time; time.sleep(300)"]!r})
print(lock._semlock.name, flush=True)
time.sleep(300)
"""
"""starts a process that does not watch its parent, and has something that a resource tracker removes"""
KEPT = """
import subprocess, sys
from agentrl.core.child_process import killed_with_parent
subprocess.Popen(killed_with_parent(sys.argv[1:]), start_new_session=True).wait()
"""
PARENT = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"


def wait_until(condition, within_s=30):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("parent", "child"),
    [pytest.param(KEPT, STARTS_ONE, id="keeper"), pytest.param(PARENT, WATCHED, id="watch")],
)
def test_a_child_of_a_killed_parent_ends_with_what_it_started(parent, child):
    process = subprocess.Popen(
        [sys.executable, "-c", parent, sys.executable, "-c", child], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = read_line(process).strip()
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 1
    assert len(session_members(children[0])) >= 2
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not session_members(children[0]))
    if said != "up":
        assert not Path(f"/dev/shm/sem.{said.removeprefix('/')}").exists()


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11), ("import os; os.abort()", -6)],
)
def test_a_kept_command_ends_as_it_would_alone(code, status):
    assert subprocess.run(killed_with_parent([sys.executable, "-c", code]), start_new_session=True).returncode == status


def test_a_kept_command_that_is_no_program_is_named():
    ended = subprocess.run(killed_with_parent(["no-such-program"]), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (127, "no-such-program: No such file or directory\n")


def test_a_parent_that_ended_before_the_keeper_started_is_noticed():
    words = killed_with_parent(SLEEP)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    words[3] = str(gone.pid)
    assert subprocess.run(words, start_new_session=True, timeout=60, capture_output=True).returncode == 0


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
