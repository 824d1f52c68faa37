"""A run killed with -9 and resumed equals one that was never killed: metrics, episodes and weights, to the bit."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from run_state import equal, state

from agentrl.config import build_config, read_toml
from agentrl.store import exactness_violations, read_episodes

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
    """In a process of its own, with its own order of sets; the fixture `driven` forks its processes from one."""
    command = [sys.executable, str(DRIVE), when, str(at), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    done = drive("never", 0, "train", "--env", "search_r1", "--run", str(run), *WORDS)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = (run / "metrics.jsonl").read_bytes()
    assert metrics.count(b"train/grad_norm") >= 2, "the run must train, or equality says nothing"
    return run


SUMMARY = """eval_em_first eval_em_last train_reward_first train_reward_last episodes turns exactness_violations stop_reasons failures
causes rollouts steps rollout_s train_s sync_s wall_s seed""".split()


@pytest.mark.slow
def test_what_a_run_leaves_behind(whole):
    assert {"trainer"} | set(
        "config.toml run.log metrics.jsonl timings.jsonl timeline.json tensorboard episodes checkpoints hf curve.png summary.json".split()
    ) == {p.name for p in whole.iterdir()}
    assert build_config(read_toml(whole / "config.toml")).rollout.num_rollout == 3
    assert (whole / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list((whole / "tensorboard").glob("events.out.tfevents.*"))
    assert {p.name for p in (whole / "hf").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["000002", "000003"]

    rows = [orjson.loads(line) for line in (whole / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in rows] == [0, 0, 1, 2, 2, 3], "rollouts 0 to 2, evaluations after 0, 2 and 3"
    assert not [key for row in rows for key in row if key.endswith("_s")], "timings would tell equal runs apart"
    timings = [orjson.loads(line) for line in (whole / "timings.jsonl").read_bytes().splitlines()]
    assert {"rollout_s", "train_s", "sync_s", "eval/test_s"} <= {key for row in timings for key in row}


@pytest.mark.slow
def test_the_summary_agrees_with_the_record(whole):
    summary = orjson.loads((whole / "summary.json").read_bytes())
    assert set(SUMMARY) <= set(summary)
    made = list(read_episodes(whole / "episodes"))
    turns = sum(len(t.turns) for t in made)
    assert turns > len(made) > 0
    assert exactness_violations(made) == summary["exactness_violations"] == 0
    assert (summary["episodes"], summary["turns"]) == (len(made), turns) == (3 * 2 * 4 + 3 * 4, turns)
    assert (summary["rollouts"], summary["eval_questions"], summary["seed"]) == (3, 4, 5)
    assert 2 <= summary["steps"] <= 3
    assert sum(summary["stop_reasons"].values()) == sum(c["count"] for c in summary["causes"]) == len(made)
    assert min(summary[name] for name in ("rollout_s", "train_s", "sync_s")) > 0
    assert summary["wall_s"] > summary["rollout_s"] + summary["train_s"]


@pytest.mark.slow
def test_more_rollouts_killed_in_a_step_and_in_a_rollout_and_resumed(tmp_path, whole, driven):
    """A finished run goes on with more rollouts, is killed twice, each time after another checkpoint, and equals the run never stopped."""
    run = tmp_path / "run"
    short = driven("never", 0, "train", "--env", "search_r1", "--run", str(run), *WORDS, "--num-rollout", "1")
    assert short.returncode == 0, short.stdout + short.stderr
    before = state(run)[2]
    (run / "summary.json").unlink()
    for when, at, words in (("train", 1, ["--num-rollout", "3"]), ("rollout", 19, [])):
        killed = driven(when, at, "train", "--resume", str(run), *words)
        assert killed.returncode == -9, killed.stdout + killed.stderr
        assert not (run / "summary.json").exists()
    resumed = driven("never", 0, "train", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed after rollout 2" in resumed.stdout
    equal(run, whole)
    assert state(run)[2] != before
    assert not list(run.glob(".*"))
    assert "num_rollout = 3" in (run / "config.toml").read_text()
    assert orjson.loads((run / "summary.json").read_bytes())["rollouts"] == 3


@pytest.mark.full
@pytest.mark.parametrize(("when", "at"), [("rollout", 19), ("train", 2)])
def test_killed_and_resumed(tmp_path, whole, when, at):
    run = tmp_path / "run"
    killed = drive(when, at, "train", "--env", "search_r1", "--run", str(run), *WORDS)
    assert killed.returncode == -9, killed.stdout + killed.stderr
    assert not (run / "summary.json").exists()
    resumed = drive("never", 0, "train", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed after rollout" in resumed.stdout
    equal(run, whole)


@pytest.mark.slow
def test_tensor_parallel_ranks_from_the_command_line(tmp_path, driven):
    """Two ranks, started by the command itself, share a step; the engine takes the weights that they make together."""
    run = tmp_path / "run"
    words = [
        *WORDS,
        "--num-rollout",
        "1",
        "--rollout-batch-size",
        "4",
        "--eval-interval",
        "0",
        "--tensor-model-parallel-size",
        "2",
    ]
    done = driven("never", 0, "train", "--env", "search_r1", "--run", str(run), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(p.name for p in (run / "trainer").iterdir()) == ["rank0.log", "rank1.log"]
    (row,) = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert row["train/steps"] == row["policy_version"] == 1
    assert row["train/grad_norm"] > 0
    assert row["train/rollout_log_prob_diff_max"] < 1e-4
    assert orjson.loads((run / "summary.json").read_bytes())["steps"] == 1
