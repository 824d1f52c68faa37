"""A run killed with -9 and resumed equals one that was never killed: metrics, episodes and weights, to the bit (cases.md 31)."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from agentrl.store import read_records

DRIVE = Path(__file__).parent / "drive.py"
WORDS = [
    "--num-rollout",
    "3",
    "--rollout-batch-size",
    "2",
    "--n-samples-per-prompt",
    "4",
    "--save-interval",
    "1",
    "--seed",
    "5",
]
WORDS += [
    "--eval-interval",
    "2",
    "--eval-limit",
    "4",
    "--lr",
    "1e-4",
    "--concurrency",
    "8",
    "--engine-max-running",
    "8",
]


def drive(when, at, *words):
    return subprocess.run(
        [sys.executable, str(DRIVE), when, str(at), "train", *words], capture_output=True, text=True, timeout=600
    )


def episodes(run):
    """Every record, less what depends on the clock."""
    found = []
    for record in read_records(run / "episodes"):
        record.pop("timings")
        for turn in record["turns"]:
            turn.pop("timings")
            for result in turn["action"]["results"]:
                result.pop("duration_s")
        found.append(orjson.dumps(record))
    return found


def state(run):
    weights = {f.name: f.read_bytes() for f in (run / "hf").glob("*.safetensors")}
    assert weights
    return (run / "metrics.jsonl").read_bytes(), episodes(run), weights


def equal(run, other):
    for mine, theirs in zip(state(run), state(other), strict=True):
        assert mine == theirs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    done = drive("never", 0, "--env", "search_r1", "--run", str(run), *WORDS)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (run / "metrics.jsonl").read_bytes()
    assert metrics.count(b"train/grad_norm") >= 2, "the run must train, or equality says nothing"
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("when", "at"), [("rollout", 19), ("train", 2)])
def test_killed_and_resumed(tmp_path, whole, when, at):
    run = tmp_path / "run"
    killed = drive(when, at, "--env", "search_r1", "--run", str(run), *WORDS)
    assert killed.returncode == -9, killed.stdout + killed.stderr
    assert not (run / "summary.json").exists()
    resumed = drive("never", 0, "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed after rollout" in resumed.stdout
    equal(run, whole)


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_rollouts(tmp_path, whole):
    run = tmp_path / "run"
    short = drive("never", 0, "--env", "search_r1", "--run", str(run), *WORDS, "--num-rollout", "1")
    assert short.returncode == 0, short.stdout + short.stderr
    before = state(run)[2]
    longer = drive("never", 0, "--resume", str(run), "--num-rollout", "3")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    equal(run, whole)
    assert state(run)[2] != before
    assert not list(run.glob(".*"))
    assert "num_rollout = 3" in (run / "config.toml").read_text()
    assert orjson.loads((run / "summary.json").read_bytes())["steps"] == 3
