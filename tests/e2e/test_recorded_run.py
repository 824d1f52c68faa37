"""A run folder recorded by an earlier version (tests/recorded) still replays, is shown, and resumes to the recorded numbers."""

import json
import shutil
from pathlib import Path

import pytest

from agentrl.store import exactness_violations, read_episodes
from agentrl.view.run_source import RunSource

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture
def run(tmp_path):
    """A copy of the recorded run, its paths those of this machine."""
    folder = tmp_path / "run"
    shutil.copytree(RECORDED / "run", folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("HERE", str(RECORDED)).replace("RUN", str(folder)))
    return folder


@pytest.fixture
def agentrl(driven):
    def agentrl(*words):
        done = driven("never", 0, *words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    return agentrl


def test_its_episodes_read_as_they_were_written(run):
    episodes = list(read_episodes(run / "episodes"))
    assert len(episodes) == 20
    assert exactness_violations(episodes) == 0
    assert sum(t.sampled_tokens for t in episodes) == 140
    assert sum(len(s) for t in episodes for s in t.segments) == 1157


def test_it_replays(run, agentrl):
    assert "20 episodes replayed: identical" in agentrl("replay", run)


def test_it_is_shown_with_what_the_trainer_was_given(run):
    source = RunSource(run)
    assert source.overview()["state"]["steps"] == 4
    shown = [source.episode(entry.id) for entry in source.recording.episodes]
    assert len(shown) == 20
    trained = [e for e in shown if e["split"] == "train"]
    assert len(trained) == 16
    assert all(e["advantage"] is not None and e["rows"] for e in trained)


@pytest.mark.slow
def test_it_resumes_to_the_recorded_metrics_and_weights(run, agentrl):
    agentrl("train", "--resume", run, "--num-rollout", "4")
    expected = json.loads((RECORDED / "expected.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # metrics that were added since the run was recorded are not compared
    for mine, theirs in zip(metrics, expected["metrics"], strict=True):
        assert {name: mine.get(name) for name in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-6)
