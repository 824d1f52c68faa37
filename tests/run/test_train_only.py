"""`agentrl train --train-only`: recorded episodes through the RL losses, rollout by rollout, without an engine."""

import dataclasses
import json

import pytest
from doubles import SAMPLED, FakeEngine, groups_of, make_runner, trajectory
from lookup import Search
from replays import NoteTrainer, script

from agentrl import __version__, reward
from agentrl.cli.main import main
from agentrl.config import build_config
from agentrl.errors import EngineFailure
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.run.train_only import complete_groups
from agentrl.store import EpisodeWriter, Recording, from_record, read_episodes
from agentrl.store.run_folder import RunFolder
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows
from agentrl.types import StopReason


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


@pytest.mark.parametrize("min_size", [1, 2, 3])
async def test_a_group_that_the_run_dropped_is_not_trained_on(tmp_path, tags, min_size):
    """Its survivors are recorded; as members of a group they would change the denominator of all rows."""
    lost = {2, 3, 4, 8}  # of four groups of three: none, two, one of three, two attempts of one episode

    def failing(request):
        index, attempt = map(int, request.session.split("/")[0].split("-")[:2])
        if index in lost - {2} or (index == 2 and not attempt):
            return EngineFailure("the server died")
        return script(request)

    runner = make_runner(Search, failing, tags, rewards=(odd,))
    attempts = {}
    limits = RolloutLimits(max_retries=1, min_group_size=min_size, max_failure_share=1.0)
    played, causes = await Rollout(runner, limits).run(groups_of(4, 3), lambda t: attempts.update({t.episode_id: t}))
    runner.close()
    writer = EpisodeWriter(tmp_path / "episodes")
    for t in sorted(attempts.values(), key=lambda t: (t.index, t.attempt)):
        writer.write(t, step=0, split="train")
    writer.close()
    groups, dropped = complete_groups(list(read_episodes(tmp_path / "episodes")), min_size)
    members = [[t.episode_id for t in g.trajectories] for g in groups]
    assert members == [[t.episode_id for t in g.trajectories] for g in played]
    assert dropped == causes.dropped_groups == {1: 0, 2: 1, 3: 2}[min_size]


def test_a_group_without_a_survivor_is_dropped_and_one_issued_small_is_not():
    failed, alone = trajectory(reason=StopReason.ENGINE_FAILURE), trajectory(index=1, group=1)
    groups, dropped = complete_groups([failed, alone], 2)
    assert [g.trajectories for g in groups] == [(alone,)]
    assert dropped == 1


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
