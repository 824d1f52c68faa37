"""A run killed with -9 at any moment continues, with equal results, and leaves nothing behind; see kills.py."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import kills
from kills import FLAVOURS, SGLANG, play_cases
from processes import heed_interrupts
from sglang_server import available


def play(seeds, folder, **options):
    cases = dict(play_cases(seeds, folder, **options))
    assert len(cases) == len(seeds)
    assert not [case for case in cases.values() if "fault" in case]
    return cases.values()


@pytest.mark.full
@pytest.mark.sglang
@pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu")
@pytest.mark.parametrize("flavour", SGLANG)
def test_a_run_with_a_genuine_server_that_is_killed_continues(tmp_path, flavour):
    play([1000], tmp_path, flavours=[flavour])


@pytest.mark.full
def test_runs_killed_at_three_moments_continue_bit_equal(tmp_path):
    play(range(3), tmp_path, flavours=["one rank"])


@pytest.mark.full
def test_runs_killed_at_a_hundred_moments_continue_bit_equal(tmp_path):
    assert {case["flavour"] for case in play(range(100), tmp_path)} == set(FLAVOURS)


@pytest.mark.full
@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "the program alone"])
def test_the_program_ends_with_its_runs_when_it_is_interrupted(tmp_path, whole_group):
    def started():
        """Processes whose file of output is in the program's temporary folder: those of a run."""
        found = []
        for file in Path("/proc").glob("[0-9]*/fd/1"):
            with suppress(OSError):  # it has ended
                found += [file] if str(tmp_path) in os.readlink(file) else []
        return found

    words = [sys.executable, kills.__file__, "--count", "1", "--flavours", "one rank"]
    env = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=heed_interrupts,
    ) as program:
        deadline = time.monotonic() + 300
        while not started() and program.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert started()
        (os.killpg if whole_group else os.kill)(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=90)
    assert program.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert not started()
    assert not [*tmp_path.iterdir()]
