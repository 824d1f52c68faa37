"""Weights of a killed process do not stay in shared memory: the next start removes them."""

import os
import subprocess
import sys

import pytest
from processes import read_line

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
    old, new, others = (tmp_path / name for name in ("agentrl-weights-old", "agentrl-weights-new", "something-else"))
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
