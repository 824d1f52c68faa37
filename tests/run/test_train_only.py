"""`agentrl train --train-only`: recorded episodes through the RL losses, rollout by rollout, without an engine."""

import dataclasses
import json

import pytest
from doubles import SAMPLED, FakeEngine, groups_of, make_runner
from lookup import Search
from replays import NoteTrainer, script

from agentrl import __version__, reward
from agentrl.cli.main import main
from agentrl.config import build_config
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import Recording, from_record
from agentrl.store.run_folder import RunFolder
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows


@reward
def odd(trajectory):
    return float(trajectory.index % 2)


@pytest.fixture
async def run(tmp_path, tokenizer_dir, tags):
    """Two recorded rollouts of three groups of two."""
    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    settings = {"run": str(tmp_path / "run"), "hf_checkpoint": str(tokenizer_dir), "tensorboard": False}
    folder = RunFolder.create(build_config(settings), __version__)
    for step in range(2):
        runner = make_runner(Search, script, tags, rewards=(odd,))
        specs = [
            [dataclasses.replace(s, index=s.index + 6 * step, group_index=s.group_index + 3 * step) for s in g]
            for g in groups_of(3, 2)
        ]
        groups, _ = await Rollout(runner, RolloutLimits()).run(specs)
        runner.close()
        for g in groups:
            for t in g.trajectories:
                folder.episodes.write(t, step=step, split="train")
    folder.close()
    return folder.path


@pytest.mark.slow
async def test_every_recorded_rollout_is_a_step_and_the_rows_are_in_the_record(
    run, tmp_path, tokenizer_dir, monkeypatch, capsys
):
    import asyncio

    trainer = NoteTrainer()
    monkeypatch.setattr("agentrl.run.components.Components.trainer", lambda self, path, *, reference: trainer)
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    monkeypatch.setattr("agentrl.run.components.Components.engine", lambda self, *_: FakeEngine(self.renderer, []))
    monkeypatch.setattr("agentrl.data.task_sets.TaskSets.training", lambda self: [groups_of(1, 1)[0][0].task])
    words = [
        "train",
        "--train-only",
        run,
        "--run",
        tmp_path / "again",
        "--hf-checkpoint",
        tokenizer_dir,
        "--tensorboard",
        "false",
        "--eval-interval",
        "0",
    ]
    assert await asyncio.to_thread(main, list(map(str, words))) == 0
    assert [sorted(r.source[0] for r in rows) for rows in trainer.fed] == [
        sorted(f"{i}-0" for i in range(s, s + 6)) for s in (0, 6)
    ]
    for rows in trainer.fed:
        assert sum(r.advantages.max() + r.advantages.min() for r in rows) == pytest.approx(0, abs=1e-4)

    assert await asyncio.to_thread(main, ["train", "--resume", str(tmp_path / "again")]) == 2
    assert "was made by --train-only" in capsys.readouterr().err

    recording = Recording(tmp_path / "again")
    assert len(recording.episodes) == 12
    samples = {e.id: to_samples(from_record(recording.record(e))) for e in recording.episodes}
    for step, rows in zip(recording.steps, trainer.fed, strict=True):
        for a, b in zip(rebuild_rows(recording.record(step), lambda e, n: samples[e][n]), rows, strict=True):
            assert all(
                getattr(a, n).tobytes() == getattr(b, n).tobytes()
                for n in ("tokens", "weights", "advantages", "rollout_log_probs", "temperature")
            )
    assert any(s.provenance is SAMPLED for s in from_record(recording.record(recording.episodes[0])).segments[0].spans)


def test_an_existing_run_folder_is_left_alone(run, tokenizer_dir, capsys, monkeypatch):
    monkeypatch.setattr("agentrl.data.task_sets.TaskSets.training", lambda self: [groups_of(1, 1)[0][0].task])
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    words = ["train", "--train-only", run, "--run", run, "--hf-checkpoint", tokenizer_dir, "--eval-interval", "0"]
    assert main(list(map(str, words))) == 2
    assert "already exists" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_folder_without_episodes_is_one_sentence(tmp_path, capsys):
    assert main(["train", "--train-only", str(tmp_path), "--run", str(tmp_path / "r")]) == 2
    assert "holds no episodes" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
