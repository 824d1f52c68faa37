"""After a power loss at any moment a run resumes, or starts again, with equal results: no state of the disk is read as another run's."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from doubles import trajectory
from power_loss import Recorder, disk_after

from agentrl import __version__
from agentrl.config import build_config
from agentrl.config.credentials import read_credentials, write_credentials
from agentrl.config.load import read_toml
from agentrl.core.atomic_write import new_folder
from agentrl.core.message_images import Image
from agentrl.errors import StoreError
from agentrl.store import Recording, episode_files, read_records
from agentrl.store.checkpoints import checkpoints, last_checkpoint
from agentrl.store.episode_files import count_readable
from agentrl.store.run_folder import RunFolder
from agentrl.types import Task

STEPS = 4
RUN = Path("runs/first")
ROTATE_BYTES = 1000
HASHES = [f"{n:064x}" for n in range(3)]


@pytest.fixture(autouse=True)
def small_files(tmp_path, monkeypatch):
    """Several data files in a run of few episodes; a folder for one; no time for fsync."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(episode_files, "ROTATE_BYTES", ROTATE_BYTES)
    (tmp_path / "whole").mkdir()


def config():
    return build_config(
        {"run": str(RUN), "hf_checkpoint": "model", "tensorboard": False, "keep_checkpoints": 2,
         "num_rollout": STEPS, "env_args": {"judge_api_key": "secret"}}
    )  # fmt: skip


def start():
    """Start a run, or resume it if it has a folder, as a user does; returns the folder and the rollouts so far."""
    if not (RUN / "config.toml").exists():
        return RunFolder.create(config(), __version__, resumable=True), 0
    saved = build_config(base=read_toml(RUN / "config.toml"))
    assert saved.to_toml() == config().to_toml(), "it would continue with other settings"
    checkpoint, state, _ = last_checkpoint(RUN, saved)
    if checkpoint is None:
        count_readable(RUN / "episodes")
    else:
        trained = (checkpoint / "trainer/weights").read_bytes()
        assert trained == weights(state["step"]), "it would continue with other weights"
    return RunFolder.reopen(RUN, saved, __version__, state, checkpoint), state.get("step", 0)


def weights(step):
    return f"weights after {step} rollouts".encode() * 20


def write_weights(step):
    def write(path):
        with new_folder(path) as folder:
            (folder / "weights").write_bytes(weights(step))

    return write


def rollout(run, step):
    for number in range(3):
        image = Image(HASHES[step % 2], f"png {step % 2}".encode() * 20)
        task = Task("t", ({"role": "user", "content": [{"type": "image", "image": image}]},))
        run.episodes.outputs.write(HASHES[step % 3], f"output {step % 3}".encode() * 20)
        run.episodes.write(replace(trajectory(index=step * 3 + number), task=task), split="train", step=step)
    run.metrics.write({"step": step, "value": step / 3})
    run.timings.write({"step": step, "rollout_s": 1.5})


def play(steps=STEPS):
    """What a training run writes: episodes with an image and a tool output, metrics, checkpoints, the weights at the end."""
    run, done = start()
    try:
        for step in range(done, steps):
            rollout(run, step)
            if step % 2 or step == 0:
                run.save(step + 1, {"step": step + 1}, write_weights(step + 1), {"buffer.jsonl": b"groups"})
        run.export(write_weights(steps))
    finally:
        run.close()
    return outcome()


def outcome():
    """What equal runs have equal."""
    blobs = sorted(f for f in (RUN / "episodes").glob("*/*") if not f.name.startswith("."))
    return {
        "config": (RUN / "config.toml").read_bytes(),
        "secrets": (RUN / "secrets.toml").read_bytes(),
        "metrics": (RUN / "metrics.jsonl").read_bytes(),
        "timings": (RUN / "timings.jsonl").read_bytes(),
        "episodes": list(read_records(RUN)),
        "indexed": [entry.id for entry in Recording(RUN).episodes],
        "blobs": {f.name: f.read_bytes() for f in blobs},
        "checkpoint": (checkpoints(RUN)[-1].name, (checkpoints(RUN)[-1] / "trainer/weights").read_bytes()),
        "hf": {f.name: f.read_bytes() for f in (RUN / "hf").iterdir()},
        "left": sorted(f.name for f in [*RUN.glob(".*"), *(RUN / "checkpoints").glob(".*")]),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run, and its outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_files, "ROTATE_BYTES", ROTATE_BYTES)
        patch.chdir(tmp_path_factory.mktemp("whole"))
        record = Recorder(Path.cwd())
        with record.recording():
            equal = play()
        return record.log, equal


@pytest.mark.parametrize("cases", [10, pytest.param(1000, marks=pytest.mark.full)])
def test_a_run_continues_equal_after_a_power_loss_at_any_moment(tmp_path, monkeypatch, whole, cases):
    """In a third of the cases power is lost once more while the run continues."""
    log, equal = whole
    for seed in range(cases):
        random, disk = Random(seed), tmp_path / str(seed)
        moments = [disk_after(log, random, disk)]
        monkeypatch.chdir(disk)
        while random.random() < 0.33:
            again = Recorder(disk)
            with again.recording():
                play()
            disk = tmp_path / f"{seed}-{len(moments)}"
            moments.append(disk_after(again.log, random, disk))
            monkeypatch.chdir(disk)
        look(equal)
        resumed = play()
        for what, expected in equal.items():
            assert resumed[what] == expected, f"seed {seed}, after {moments} events: {what}"
        shutil.rmtree(tmp_path / str(seed))


def look(equal):
    """What can be read of the run before it continues is what was written."""
    try:
        entries = Recording(RUN).episodes
    except StoreError:
        return
    assert {entry.id for entry in entries} <= set(equal["indexed"])


def test_what_was_synced_outlasts_a_power_loss(tmp_path, monkeypatch):
    """A checkpoint that was reported, with what it refers to, and the weights that were exported first or last."""
    monkeypatch.chdir(tmp_path / "whole")
    record = Recorder(Path.cwd())
    with record.recording():
        run, _ = start()
        rollout(run, 0)
        run.export(write_weights(0))
        run.save(1, {"step": 1}, write_weights(1))
        record.look()
        saved = len(record.log)
        run.export(write_weights(1))
        run.close()
    for seed in range(32):
        disk_after(record.log, Random(seed), tmp_path / str(seed), saved if seed % 4 == 0 else len(record.log))
        monkeypatch.chdir(tmp_path / str(seed))
        run, done = start()
        run.close()
        assert done == 1
        assert (RUN / "hf/weights").read_bytes() in (weights(0), weights(1))


def test_dropped_episodes_do_not_return(tmp_path, monkeypatch):
    """A resumed run drops the episodes after its checkpoint. They are not there again once it has saved the next one."""
    monkeypatch.chdir(tmp_path / "whole")
    monkeypatch.setattr(episode_files, "ROTATE_BYTES", 1 << 20)
    run, _ = start()
    rollout(run, 0)
    run.save(1, {"step": 1}, write_weights(1))
    rollout(run, 1)
    run.close()
    record = Recorder(Path.cwd())
    with record.recording():
        run, _ = start()
        rollout(run, 1)
        run.save(2, {"step": 2}, write_weights(2))
        run.close()
    for seed in range(10):
        disk_after(record.log, Random(seed), tmp_path / str(seed), len(record.log))
        monkeypatch.chdir(tmp_path / str(seed))
        run, done = start()
        run.close()
        assert (done, [r["index"] for r in read_records(RUN)]) == (2, [0, 1, 2, 3, 4, 5])


def test_a_temporary_file_of_an_earlier_process_with_the_same_id_is_replaced(tmp_path):
    """As in a container, where the ids of processes repeat."""
    file = tmp_path / "secrets.toml"
    (tmp_path / f".secrets.toml.{os.getpid()}.{threading.get_ident()}").write_text("half")
    write_credentials(file, {"a": "b"})
    assert read_credentials(file) == {"a": "b"}
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["secrets.toml"]
