"""A damaged checkpoint is never resumed from: the one before is used, or the run is refused."""

import shutil

import orjson
import pytest
from doubles import trajectory

from agentrl import __version__
from agentrl.config import build_config
from agentrl.errors import StoreError
from agentrl.store import Recording
from agentrl.store.checkpoints import checkpoints, last_checkpoint, read_state, verified_state
from agentrl.store.run_folder import RunFolder


@pytest.fixture
def config(tmp_path):
    return build_config({"run": str(tmp_path / "run"), "hf_checkpoint": str(tmp_path), "tensorboard": False})


def trainer(step):
    def save(path):
        path.mkdir()
        for name in (".metadata", "__0_0.distcp", "common.pt"):
            (path / name).write_bytes(f"{name} after {step}".encode() * 50)

    return save


def play(folder, steps):
    for step in steps:
        folder.episodes.write(trajectory(), split="train", step=step - 1)
        folder.metrics.write({"step": step - 1})
        folder.timings.write({"step": step - 1, "rollout_s": 0.5})
        folder.save(step, {"step": step, "value": 0.1 * step, "text": "ü"}, trainer(step))


@pytest.fixture
def run(config):
    """A run with checkpoints after 1 and 2 rollouts, and what was written since."""
    folder = RunFolder.create(config, __version__, resumable=True)
    play(folder, (1, 2))
    folder.metrics.write({"step": 2, "lost": True})
    folder.episodes.write(trajectory(), split="train", step=2)
    folder.close()
    return folder.path


def flip(path, at=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


LAST = "checkpoints/000002/"
FILES = [LAST + name for name in ("state.json", "trainer/.metadata", "trainer/__0_0.distcp", "trainer/common.pt")]
DAMAGES = [flip, cut, empty, lambda path: path.unlink()]


def test_an_undamaged_run_resumes_from_its_last_checkpoint(run, config):
    point = last_checkpoint(run, config)
    assert (point.checkpoint.name, point.state["step"], point.damaged) == ("000002", 2, ())


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_used_and_the_next_save_works(run, config, file, damage):
    damage(run / file)
    point = last_checkpoint(run, config)
    assert (point.checkpoint.name, point.state["step"]) == ("000001", 1)
    (reason,) = point.damaged
    assert "000002" in reason
    folder = RunFolder.reopen(run, config, __version__, point.state, point.checkpoint)
    assert folder.metrics.rows() == [{"step": 0}]
    play(folder, (2,))
    folder.close()
    assert [p.name for p in checkpoints(run)] == ["000001", "000002"]
    assert (run / "checkpoints" / "000002.damaged").is_dir(), "nothing is thrown away"
    assert last_checkpoint(run, config).damaged == ()
    assert len(Recording(run).episodes) == 2


@pytest.mark.parametrize("file", FILES)
def test_a_run_without_an_intact_checkpoint_is_refused_and_stays_unchanged(run, config, file):
    shutil.rmtree(run / "checkpoints" / "000001")
    cut(run / file)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match=r"cannot be resumed, because no checkpoint is intact: .*000002.*; restore"):
        last_checkpoint(run, config)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_no_flipped_byte_of_a_state_is_read(run):
    file = run / LAST / "state.json"
    for position in range(0, file.stat().st_size, 5):
        flip(file, position)
        with pytest.raises(StoreError, match="state"):
            read_state(file.parent)
        flip(file, position)
    assert read_state(file.parent)["step"] == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_metrics_shorter_than_the_last_checkpoint_says(run, config, name):
    first = (run / name).read_bytes().splitlines(keepends=True)[0]
    (run / name).write_bytes(first)
    point = last_checkpoint(run, config)
    assert point.checkpoint.name == "000001"
    assert f"{name} has {len(first)} bytes" in point.damaged[0]
    (run / name).unlink()
    with pytest.raises(StoreError, match=f"{name} has 0 bytes"):
        last_checkpoint(run, config)
    assert not (run / name).exists()


def test_changed_metrics_are_refused(run, config):
    flip(run / "metrics.jsonl", 2)
    with pytest.raises(StoreError, match=r"metrics\.jsonl was changed in its first"):
        last_checkpoint(run, config)


def test_missing_episode_files_are_refused(run, config):
    (run / "episodes" / "000000.jsonl.zst").unlink()
    with pytest.raises(StoreError, match=r"000000\.jsonl\.zst is missing"):
        last_checkpoint(run, config)
    shutil.rmtree(run / "episodes")
    with pytest.raises(StoreError, match=r"000000\.jsonl\.zst is missing"):
        last_checkpoint(run, config)


def test_a_missing_earlier_episode_file_is_refused(run, config):
    for _ in range(2):
        point = last_checkpoint(run, config)
        folder = RunFolder.reopen(run, config, __version__, point.state, point.checkpoint)
        play(folder, (point.state["step"] + 1,))
        folder.close()
    (run / "episodes" / "000001.jsonl.zst").unlink()
    with pytest.raises(StoreError, match=r"000001\.jsonl\.zst is missing"):
        last_checkpoint(run, config)


def test_checkpoints_swapped_between_steps_or_runs_are_not_used(run, config):
    one, two = (run / "checkpoints" / name for name in ("000001", "000002"))
    shutil.rmtree(two)
    shutil.copytree(one, two)
    point = last_checkpoint(run, config)
    assert point.checkpoint.name == "000001"
    assert "holds the state after rollout 1" in point.damaged[0]


def test_a_checkpoint_without_checksums_still_resumes(run, config):
    """As an older agentrl wrote it."""
    file = run / LAST / "state.json"
    state = orjson.loads(file.read_bytes())
    old = {k: v for k, v in state.items() if not k.endswith(("checksum", "files", "sizes"))}
    file.write_bytes(orjson.dumps(old))
    assert last_checkpoint(run, config).checkpoint.name == "000002"
    cut(run / "episodes" / "000000.jsonl.zst")
    assert last_checkpoint(run, config).checkpoint.name == "000001"


def test_files_are_synced_before_the_rename(run, config, monkeypatch):
    """The order that a power loss needs: contents, folders, rename, parent folder."""
    import os
    from pathlib import Path

    calls = []
    fsync, rename = os.fsync, Path.rename

    def syncing(descriptor):
        calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renaming(path, target):
        calls.append(("rename", str(path)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "rename", renaming)
    folder = RunFolder.reopen(run, config, __version__, *reversed(last_checkpoint(run, config)[:2]))
    play(folder, (3,))
    folder.close()
    (renamed,) = (n for n, (kind, path) in enumerate(calls) if kind == "rename" and "000003" in path)
    temporary = calls[renamed][1]
    before = [path for _, path in calls[:renamed]]
    inside = [f"{temporary}/{name}" for name in ("trainer/.metadata", "trainer/__0_0.distcp", "trainer", "state.json")]
    records = [str(run / name) for name in ("metrics.jsonl", "timings.jsonl", "episodes/000001.jsonl.zst", "episodes")]
    assert {*inside, temporary, *records} <= set(before)
    assert max(map(before.index, records)) < min(map(before.index, inside))
    assert before.index(inside[1]) < before.index(inside[3])
    assert calls[renamed + 1] == ("sync", str(run / "checkpoints"))


def test_a_checkpoint_that_is_being_written_is_none_until_it_is_complete(config):
    """The run goes on meanwhile: its files grow, which the checkpoint does not contain."""
    folder = RunFolder.create(config, __version__, resumable=True)
    play(folder, [1])
    complete = folder.begin_save(2, {"step": 2}, lambda path: lambda: trainer(2)(path))
    assert [c.name for c in checkpoints(folder.path)] == ["000001"]
    folder.metrics.write({"step": 1})
    folder.episodes.write(trajectory(), split="train", step=1)
    checkpoint = complete()
    assert [c.name for c in checkpoints(folder.path)] == ["000001", "000002"]
    assert verified_state(folder.path, checkpoint)["metrics_bytes"] < folder.metrics.position()

    def fail():
        raise OSError("disk full")

    failing = folder.begin_save(3, {"step": 3}, lambda path: fail if trainer(3)(path) is None else None)
    with pytest.raises(OSError, match="disk full"):
        failing()
    assert {c.name for c in (folder.path / "checkpoints").iterdir()} == {"000001", "000002"}, "nothing is left of it"
    folder.close()
