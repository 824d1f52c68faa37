"""Weights of a killed process do not stay in shared memory: the next start removes them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import read_line

from agentrl.core.file_lock import is_locked, locked_folder, try_lock
from agentrl.weight_sync import base
from agentrl.weight_sync.base import UNLOCKED_S, WeightSync, new_weights_folder

HOLD = """
import os, sys
from pathlib import Path
from agentrl.weight_sync.base import WeightSync
sync = WeightSync(None, Path(sys.argv[1]))
(sync.folder / "v1").mkdir()
(sync.folder / "v1" / "model.safetensors").write_bytes(bytes(1000))
if os.fork():
    print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_weights_of_a_killed_process_are_removed_by_the_next_start(tmp_path):
    for _ in range(3):
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert read_line(other) == "written\n"
            mine = WeightSync(None, tmp_path)
            assert len(list(tmp_path.iterdir())) == 2, "those of a living process stay, those of killed ones do not"
            mine.close()
            other.kill()
            other.wait()
    mine = WeightSync(None, tmp_path)
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.close()
    assert not list(tmp_path.iterdir())


def test_folders_without_a_lock_are_removed_when_they_are_old(tmp_path):
    old, new, others = (tmp_path / n for n in ("agentrl-weights-old", "agentrl-weights-new", "something-else"))
    for folder in (old, new, others):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
    os.utime(old, (0, os.stat(new).st_mtime - UNLOCKED_S - 1))
    os.utime(others, (0, 0))
    (tmp_path / "agentrl-weights-link").symlink_to(others)
    _, lock = new_weights_folder(tmp_path)
    lock.close()
    assert not old.exists()
    assert new.exists()
    assert (others / "model.safetensors").exists()


def test_what_a_start_that_was_killed_was_making_is_removed_at_once(tmp_path):
    empty, unlocked = (tmp_path / f"agentrl-weights-{name}" for name in ("empty", "unlocked"))
    empty.mkdir()
    unlocked.mkdir()
    (unlocked / "lock").touch()
    mine = WeightSync(None, tmp_path)
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.close()


def test_a_start_removes_no_folder_that_another_start_is_making(tmp_path, monkeypatch):
    def lock_while_another_starts(file):
        monkeypatch.setattr(base, "try_lock", try_lock)
        other = threading.Thread(target=lambda: others.append(WeightSync(None, tmp_path)))
        other.start()
        starting.append(other)
        other.join(0.2)
        assert not others, "it waits"
        return try_lock(file)

    others, starting = [], []
    monkeypatch.setattr(base, "try_lock", lock_while_another_starts)
    mine = WeightSync(None, tmp_path)
    starting[0].join(30)
    third = WeightSync(None, tmp_path)
    folders = {sync.folder for sync in (mine, third, *others)}
    assert set(tmp_path.iterdir()) == folders
    assert len(folders) == 3
    for sync in (mine, third, *others):
        sync.close()
    assert not list(tmp_path.iterdir())


def test_a_start_does_not_wait_for_a_folder_without_end(tmp_path):
    with locked_folder(tmp_path), locked_folder(tmp_path, timeout_s=0.05):
        pass
    with locked_folder(tmp_path):
        started = time.monotonic()
    assert time.monotonic() - started < 5


def test_a_lock_is_taken_although_others_look_whether_it_is(tmp_path):
    paths = [tmp_path / str(n) for n in range(3)]
    for path in paths:
        path.touch()
    looking = threading.Event()

    def look():
        while not looking.is_set():
            for path in paths:
                is_locked(path)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for path in paths * 100:
            with path.open("rb") as file:
                assert try_lock(file)
    finally:
        looking.set()
        for looker in lookers:
            looker.join()


SHARE = """
import sys, torch
from agentrl.train.megatron.delivery.buckets import buckets, serialise
torch.multiprocessing.set_sharing_strategy("file_system")
(bucket,) = buckets([("a", torch.ones(1000), [1000])], 1 << 20, shared=True)
serialise(bucket)
print("shared", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_torch_removes_the_tensors_that_a_killed_rank_shared():
    """By its torch_shm_manager, which is in a session of its own and outlives the rank and its process group."""
    pytest.importorskip("torch")
    with subprocess.Popen(
        [sys.executable, "-c", SHARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as rank:
        assert read_line(rank) == "shared\n"
        assert files_of(rank.pid)
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        deadline = time.monotonic() + 10
        while files_of(rank.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not files_of(rank.pid)


def files_of(pid):
    """The files of torch in shared memory that a process made."""
    return list(Path("/dev/shm").glob(f"torch_{pid}_*"))
