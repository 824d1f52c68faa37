"""The first signal closes, the second ends at once, and every stop has a bound."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import heed_interrupts, read_line

from agentrl.cli.common import run_job

JOB = """
import asyncio, sys, time
from agentrl.cli import common
common.STOP_TIMEOUT_S, common.LEFTOVER_TIMEOUT_S = float(sys.argv[2]), 0.2

async def swallows():
    while True:
        try:
            print("ready", flush=True)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            print("swallowed", flush=True)

async def blocks():
    print("ready", flush=True)
    while True:
        time.sleep(0.05)

async def closes():
    try:
        print("ready", flush=True)
        await asyncio.sleep(3600)
    finally:
        print("closed", flush=True)

async def leaves_a_task():
    task = asyncio.create_task(swallows())
    await asyncio.sleep(0.1)

try:
    common.run_job(globals()[sys.argv[1]]())
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
print("done", flush=True)
"""


@pytest.fixture
def start():
    """Starts a job; whatever becomes of the test, the job ends with it."""
    started = []

    def start(job, bound_s):
        words = [sys.executable, "-c", JOB, job, str(bound_s)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(words, **pipes, preexec_fn=heed_interrupts)
        started.append(process)
        assert read_line(process) == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_closes(start, sign):
    process = start("closes", 60)
    process.send_signal(sign)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "closed\ninterrupted\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["swallows", "blocks"])
def test_the_second_signal_ends_at_once(start, job):
    process = start(job, 60)
    process.send_signal(signal.SIGINT)
    if job == "swallows":
        assert read_line(process) == "swallowed\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "agentrl: stopped at the second signal, without closing\n")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["swallows", "blocks"])
def test_a_job_that_ignores_the_signal_is_ended_after_the_bound(start, job):
    process = start(job, 0.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "stopped without closing, which took more than 0.5 s" in err


@pytest.mark.slow
def test_a_finished_job_does_not_wait_for_a_task_that_swallows_its_cancellation(start):
    process = start("leaves_a_task", 60)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "done"


def test_an_ignored_signal_stays_ignored():
    async def job():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is not before_term
        await asyncio.sleep(0.05)

    before_term = signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_job(job())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is before_term


def test_every_command_prints_through_the_filter():
    package = Path(__file__).parents[2] / "agentrl"
    files = [*(package / "cli").glob("*.py"), *(package / "run").glob("*.py"), package / "core/terminal_text.py"]
    bare = [p.name for p in files for line in p.read_text().splitlines() if line.lstrip().startswith("print(")]
    assert bare == ["terminal_text.py"], "print_now makes control characters visible"
