"""Would the tests notice? Each fault of `faults.py` is put into a copy of the source, where the test that must catch it has to fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutations.faults import FAULTS

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 0, 1
"""exit statuses of pytest; others mean that no test ran"""


def copy_source(to):
    """The repository as links to it, with a folder `agentrl` whose files can be replaced one by one."""
    for name in ("pyproject.toml", "tests", "envs", "tools", "rewards", "examples", "docs"):
        (to / name).symlink_to(ROOT / name)
    for parent, folders, files in os.walk(ROOT / "agentrl"):
        target = to / Path(parent).relative_to(ROOT)
        target.mkdir()
        for name in (*files, *(f for f in folders if Path(parent, f).is_symlink())):
            (target / name).symlink_to(Path(parent, name))
    return to


def plant(source, fault):
    """Put a fault into the copy.

    Raises:
        AssertionError: its place is gone, or not the only one.
    """
    file = source / "agentrl" / fault.file
    text = file.read_text()
    assert text.count(fault.before) == 1, f"{fault.what}: {fault.file} holds the text {text.count(fault.before)} times"
    file.unlink()
    file.write_text(text.replace(fault.before, fault.after))
    compile(file.read_text(), str(file), "exec")


@pytest.fixture(scope="module")
def forks():
    """The process that runs tests on copies of the source."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    words = [sys.executable, str(Path(__file__).with_name("fork_tests.py"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/") as process:
        yield process
        process.stdin.close()
        process.wait(60)


def run_tests(forks, source, *tests):
    """Exit status and output of the tests on the copy."""
    output = source / "output.txt"
    job = {"source": str(source), "tests": tests, "output": str(output)}
    print(json.dumps(job), file=forks.stdin, flush=True)
    return int(forks.stdout.readline()), output.read_text(errors="replace")


def test_every_fault_has_a_place_and_a_name_of_its_own(tmp_path):
    assert len({f.what for f in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        text = (ROOT / "agentrl" / fault.file).read_text()
        assert text.count(fault.before) == 1, (
            f"{fault.what}: {fault.file} holds the text {text.count(fault.before)} times"
        )
        assert fault.before != fault.after


def marked(fault):
    return pytest.param(fault, id=fault.what, marks=pytest.mark.slow if fault.quick else pytest.mark.full)


@pytest.mark.parametrize("fault", list(map(marked, FAULTS)))
def test_a_planted_fault_fails_its_test(tmp_path, forks, fault):
    source = copy_source(tmp_path)
    plant(source, fault)
    status, output = run_tests(forks, source, fault.test)
    assert status == FAILED, f"{fault.what}: {fault.test} ended with status {status}:\n{output[-2000:]}"


@pytest.mark.full
def test_the_same_tests_pass_without_a_fault(tmp_path, forks):
    source = copy_source(tmp_path)
    tests = sorted({f.test for f in FAULTS})
    status, output = run_tests(forks, source, *tests)
    assert status == PASSED, output[-3000:]


@pytest.fixture(autouse=True)
def removed(tmp_path):
    """The copies are removed at once."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)
