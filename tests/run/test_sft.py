"""`agentrl sft`: the run folder holds the episodes and the batches that the trainer was given."""

import asyncio
import json

import numpy as np
import pytest
from doubles import trajectory
from replays import NoteTrainer

from agentrl.cli.main import main
from agentrl.errors import ConfigError, DataError
from agentrl.run.sft import recorded_episodes
from agentrl.store import EpisodeWriter, Recording, from_record
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows
from agentrl.view.episode_detail import episode_detail

CONVERSATIONS = [
    [("user", f"question {i}?"), ("assistant", f"answer {i}"), ("user", "sure?"), ("assistant", "yes")]
    for i in range(5)
]


class Taught(NoteTrainer):
    def step(self, rows, loss, lr):
        super().step(rows, loss, lr)
        assert loss.kind == "sft"
        log_probs = [np.where(r.weights > 0, np.float32(-0.25), 0).astype(np.float32) for r in rows]
        return {"loss": 0.5, "grad_norm": 1.0, "log_probs": log_probs}


@pytest.fixture
def run(tmp_path, tokenizer_dir, monkeypatch):
    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    data = tmp_path / "data.jsonl"
    lines = [{"messages": [{"role": r, "content": c} for r, c in rows]} for rows in CONVERSATIONS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trainer = Taught()
    monkeypatch.setattr("agentrl.run.components.Components.trainer", lambda self, path, *, reference: trainer)
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", lambda self: None)
    words = ["sft", data, data, "--run", tmp_path / "run", "--hf-checkpoint", tokenizer_dir, "--sft-batch-size", "4"]
    assert main([*map(str, words), "--action-format", "hermes", "--sft-epochs", "2"]) == 0
    return tmp_path / "run", trainer


def test_every_step_and_every_episode_is_in_the_record(run):
    folder, trainer = run
    recording = Recording(folder)
    assert {e.id for e in recording.episodes} == {f"{source}/{i}-0" for source in (0, 1) for i in range(5)}
    assert {e.split for e in recording.episodes} == {"sft"}
    assert len(recording.steps) == len(trainer.fed) == 6
    samples = {e.id: to_samples(from_record(recording.record(e)), demonstrations=True) for e in recording.episodes}
    for number, (step, rows) in enumerate(zip(recording.steps, trainer.fed, strict=True)):
        record = recording.record(step)
        assert (record["step"], record["optimizer_step"], record["loss"]["kind"]) == (number, number + 1, "sft")
        assert record["metrics"] == {"loss": 0.5, "grad_norm": 1.0}
        assert record["plan"]
        for a, b in zip(rebuild_rows(record, lambda e, n: samples[e][n]), rows, strict=True):
            assert a.source == b.source
            assert a.tokens.tobytes() == b.tokens.tobytes()
            assert a.weights.tobytes() == b.weights.tobytes()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [set(line) for line in lines] == [{"step", "train/loss", "train/grad_norm"}] * 6


def test_the_page_shows_what_was_taught(run):
    folder, _ = run
    recording = Recording(folder)
    record = recording.record(recording.entry("1/2-0"))
    detail = episode_detail(record, recording.step_of("1/2-0"), None, 0.0)
    (segment,) = detail["segments"]
    taught = [n for n, p in enumerate(segment["provenance"]) if p == 5]
    assert taught
    assert [n for n, m in enumerate(segment["mask"]) if m] == taught
    assert {segment["trainer_log_prob"][n] for n in taught} == {-0.25}
    (row,) = detail["rows"]
    assert row["trained"] == len(taught)
    assert detail["training_step"]["loss"]["kind"] == "sft"


def test_episodes_of_evaluations_are_left_out(tmp_path):
    writer = EpisodeWriter(tmp_path / "run/episodes")
    for index, split in enumerate(("eval/test", "train", "eval/test")):
        writer.write(trajectory(index=index), split=split)
    writer.close()
    said = []
    assert [t.episode_id for t in recorded_episodes(tmp_path / "run", said.append)] == ["1-0"]
    assert said == [f"{tmp_path / 'run'}: 2 episodes of evaluations left out"]

    writer = EpisodeWriter(tmp_path / "eval/episodes")
    writer.write(trajectory(), split="eval/test")
    writer.close()
    with pytest.raises(DataError, match="holds only evaluations"):
        recorded_episodes(tmp_path / "eval", print)


def test_a_model_of_images_is_refused(tmp_path, tokenizer_dir, monkeypatch):
    from agentrl.config import build_config
    from agentrl.run import sft

    def refuse(self):
        raise ConfigError("images")

    (tokenizer_dir / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    monkeypatch.setattr("agentrl.run.components.Components.require_trainable", refuse)
    config = build_config({"hf_checkpoint": str(tokenizer_dir), "run": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="images"):
        asyncio.run(sft.sft(config, [tmp_path / "x.jsonl"]))
    assert not (tmp_path / "run").exists()
