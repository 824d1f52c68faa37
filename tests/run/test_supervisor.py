"""A run under `--use-fault-tolerance` is started again after a crash, and only then, and not without end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.run.supervisor import MAX_RESTARTS, supervise

CHILD = """
import os, signal, sys
from pathlib import Path
from agentrl.run.supervisor import Supervised
from agentrl.errors import ConfigError, NonFiniteError, WorkerError

run, ends = Path(sys.argv[1]), sys.argv[2].split(",")
supervised = Supervised.of_environment()
assert "AGENTRL_SUPERVISOR_FD" not in os.environ
starts = run / "starts"
number = len(starts.read_text()) if starts.exists() else 0
if ends[0] != "early" or number:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    supervised.report_folder(run)
run.mkdir(exist_ok=True)
starts.write_text("x" * (number + 1))
(run / f"words{number}").write_text(" ".join(sys.argv[3:]))
end = ends[min(number, len(ends) - 1)]
if end == "saves":
    (run / f"checkpoints/{number + 1:06d}").mkdir()
if end in ("kill", "saves", "early"):
    os.kill(os.getpid(), signal.SIGKILL)
if end == "hangs":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    print("started", flush=True)
    signal.pause()
if end == "traceback":
    raise RuntimeError("a bug")
with supervised.reporting_final_errors():
    if end in ("usage", "nonfinite"):
        raise (ConfigError if end == "usage" else NonFiniteError)("no")
    if end == "worker":
        raise WorkerError("a rank died")
"""
SUPERVISOR = """
import sys
from agentrl.run.supervisor import supervise
child, run, ends = sys.argv[1:]
words = [sys.executable, "-c", child, run, ends]
sys.exit(supervise([*words, "first"], lambda folder: [*words, "resume"], lambda line: print(line, file=sys.stderr, flush=True), backoff_s=30.0))
"""


def outcome(run: Path, ends: str, capfd=None):
    """Exit status and the words of each start."""
    words = [sys.executable, "-c", CHILD, str(run), ends]
    status = supervise([*words, "first"], lambda folder: [*words, "resume"], print, backoff_s=0.0)
    starts = len((run / "starts").read_text())
    return status, [(run / f"words{n}").read_text().split()[0] for n in range(starts)]


@pytest.mark.parametrize(
    ("ends", "status", "starts"),
    [
        ("fine", 0, 1),
        ("kill,fine", 0, 2),
        ("early,fine", 0, 2),
        ("traceback,worker,fine", 0, 3),
        ("usage", 1, 1),
        ("nonfinite", 1, 1),
        ("kill", 128 + 9, MAX_RESTARTS + 1),
        ("saves,saves,saves,saves,fine", 0, 5),
    ],
)
def test_which_ends_are_crashes(ends, status, starts, tmp_path, capfd):
    found, words = outcome(tmp_path / "run", ends)
    assert (found, len(words)) == (status, starts)
    resumed = "first" if ends.startswith("early") else "resume"
    assert words == ["first", *[resumed] * min(1, starts - 1), *["resume"] * (starts - 2)][:starts]
    printed = capfd.readouterr().out
    assert ("given up; to continue: " in printed) == (status == 128 + 9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_of_the_user_reaches_the_run_and_ends_it(number, tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SUPERVISOR,
            CHILD.replace("signal.SIGTERM, lambda", f"{int(number)}, lambda"),
            str(tmp_path / "run"),
            "hangs",
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"started\n"
    process.send_signal(number)
    assert process.wait(30) == 130
    process.stdout.close()
    assert (tmp_path / "run/starts").read_text() == "x"


def test_a_signal_of_the_user_ends_the_pause_before_a_restart(tmp_path):
    command = [sys.executable, "-c", SUPERVISOR, CHILD, str(tmp_path / "run"), "kill"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert b"started again" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130
    process.stderr.close()
    assert (tmp_path / "run/starts").read_text() == "x"


def test_the_run_ends_with_its_supervisor(tmp_path):
    command = [sys.executable, "-c", SUPERVISOR, CHILD, str(tmp_path / "run"), "hangs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)
    process.stdout.close()


def _runs(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
