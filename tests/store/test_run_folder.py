"""A run folder belongs to one run at a time, and a resumed run removes nothing that another process is still writing."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import trajectory
from processes import read_line

from agentrl import __version__
from agentrl.cli.main import main
from agentrl.config import build_config
from agentrl.core.atomic_write import new_folder
from agentrl.errors import ConfigError, StoreError
from agentrl.store import Recording
from agentrl.store.checkpoints import last_checkpoint
from agentrl.store.run_folder import RunFolder


@pytest.fixture
def config(tmp_path):
    return build_config({"run": str(tmp_path / "run"), "hf_checkpoint": str(tmp_path), "tensorboard": False})


def begun(config):
    """The folder of a training run that has started."""
    folder = RunFolder.create(config, __version__)
    (folder.path / "checkpoints").mkdir()
    return folder


def written(folder):
    return {p.name: p.read_bytes() for p in folder.path.iterdir() if p.is_file()}


def test_an_active_run_is_not_resumed(config, capsys):
    folder = begun(config)
    for step in range(3):
        folder.metrics.write({"step": step})
    before = written(folder)
    with pytest.raises(StoreError, match="still active"):
        RunFolder.reopen(folder.path, config, "another version", {})
    assert main(["train", "--resume", str(folder.path)]) == 2
    assert written(folder) == before
    folder.close()
    assert last_checkpoint(folder.path, config) == (None, {}, ())
    again = RunFolder.reopen(folder.path, config, __version__, {})
    assert again.metrics.rows() == []
    again.close()


def test_a_resumed_run_is_truncated_to_its_checkpoint(config):
    folder = RunFolder.create(config, __version__)
    folder.metrics.write({"step": 0})
    folder.save(1, {"step": 1}, lambda path: path.mkdir())
    folder.metrics.write({"step": 1, "lost": True})
    folder.close()
    last, state, _ = last_checkpoint(folder.path, config)
    assert (last.name, state["step"]) == ("000001", 1)
    again = RunFolder.reopen(folder.path, config, __version__, state)
    again.metrics.write({"step": 1})
    assert again.metrics.rows() == [{"step": 0}, {"step": 1}]
    assert again.metrics.position() == again.metrics.path.stat().st_size
    again.close()


HOLD = """
import sys
from agentrl.store.json_lines import JsonLines
lines = JsonLines(__import__("pathlib").Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_run_is_free(config):
    folder = begun(config)
    folder.close()
    command = [sys.executable, "-c", HOLD, str(folder.path / "metrics.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert read_line(other) == "held\n"
        with pytest.raises(StoreError, match="still active"):
            RunFolder.reopen(folder.path, config, __version__, {})
        other.kill()
    RunFolder.reopen(folder.path, config, __version__, {}).close()


def test_nothing_is_overwritten(config):
    folder = RunFolder.create(config, __version__)
    folder.metrics.write({"step": 0})
    folder.close()
    with pytest.raises(ConfigError, match=r"already exists; choose another with --run$"):
        RunFolder.create(config, __version__)
    (Path(config.run.run) / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"already exists; .* or resume the run: agentrl train --resume"):
        RunFolder.create(config, __version__)


def test_a_folder_that_is_not_of_a_run_is_not_replaced(config):
    path = Path(config.run.run)
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        RunFolder.create(config, __version__)
    (path / "config.toml").touch()
    with pytest.raises(ConfigError, match="already exists"):
        RunFolder.create(config, __version__)
    assert (path / "notes.txt").read_text() == "mine"


def test_an_active_run_is_not_replaced(config):
    folder = RunFolder.create(config, __version__, resumable=True)
    with pytest.raises(ConfigError, match="already exists"):
        RunFolder.create(config, __version__)
    folder.close()


KILL_AT_START = """
import os, signal, sys
from pathlib import Path
from agentrl import __version__
from agentrl.config import build_config
from agentrl.store.run_folder import RunFolder

calls = int(sys.argv[2])

def dying(name, args):
    global calls
    if name in ("open", "os.mkdir", "os.rename", "os.remove") and sys.argv[1] in str(args):
        calls -= 1
        if calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)

config = build_config({"run": sys.argv[1] + "/run", "hf_checkpoint": sys.argv[1], "tensorboard": False})
sys.addaudithook(dying)
RunFolder.create(config, __version__, resumable=True)
"""


@pytest.mark.parametrize("calls", [0, 1, 3, 5, 7, 9, 10, 11, 12, 14, 16])
def test_a_run_killed_while_it_starts_can_be_resumed_or_started_again(config, tmp_path, calls):
    done = subprocess.run([sys.executable, "-c", KILL_AT_START, str(tmp_path), str(calls)], timeout=60)
    assert done.returncode == -9
    path = tmp_path / "run"
    if path.exists():
        again = RunFolder.reopen(path, config, __version__, last_checkpoint(path, config).state)
        again.close()
    again = RunFolder.create(config, __version__, resumable=True)
    assert again.metrics.rows() == []
    again.close()
    assert [p.name for p in tmp_path.glob("*")] == ["run"]


def test_what_a_run_that_was_killed_while_it_exported_left_is_removed(config):
    folder = begun(config)
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, timeout=60
    )
    (folder.path / f"..hf-new.{int(dead.stdout)}.tmp").mkdir()

    def write(path):
        with new_folder(path) as new:
            (new / "model.safetensors").write_bytes(b"weights")

    folder.export(write)
    folder.close()
    assert [p.name for p in folder.path.glob("*hf*")] == ["hf"]


def test_a_resumed_run_removes_what_was_being_written_and_nothing_else(config):
    folder = begun(config)
    folder.close()
    theirs, ours = (
        ".gitignore",
        (".config.toml.12.140012", "..hf-new.12.tmp", ".hf-old", "episodes/images/.a.png.12.140012"),
    )
    (folder.path / theirs).write_text("*")
    for name in ours:
        (folder.path / name).mkdir(parents=True)
    RunFolder.reopen(folder.path, config, __version__, {}).close()
    left = [p.name for p in folder.path.rglob(".*")]
    assert left == [theirs]
    assert (folder.path / "hf").is_dir(), "the weights that were being replaced"


def test_a_run_with_episodes_is_not_replaced(config):
    folder = RunFolder.create(config, __version__, resumable=True)
    folder.episodes.write(trajectory(), split="train")
    folder.close()
    with pytest.raises(ConfigError, match=r"already exists; .* or resume the run: agentrl train --resume"):
        RunFolder.create(config, __version__)
    assert len(Recording(folder.path).episodes) == 1


FORKS = """
import os, sys, time
from pathlib import Path
from agentrl.store.json_lines import JsonLines
lines = JsonLines(Path(sys.argv[1]))
lines.write({"step": 0})
if os.fork() == 0:
    lines.write({"child": 1})
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


def test_a_forked_child_of_a_killed_run_does_not_keep_its_lock(config):
    folder = begun(config)
    folder.close()
    command = [sys.executable, "-c", FORKS, str(folder.path / "metrics.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert read_line(run) == "forked\n"
        with pytest.raises(StoreError, match="still active"):
            RunFolder.reopen(folder.path, config, __version__, {})
        run.kill()
        run.wait()
        again = RunFolder.reopen(folder.path, config, __version__, {"metrics_bytes": 11})
        assert again.metrics.rows() == [{"step": 0}], "the child's row did not reach the file"
        again.close()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "guess.py").touch()
    config = build_config({"run": str(tmp_path / "guess.py" / "x")})
    with pytest.raises(ConfigError, match=r"guess\.py/x cannot be created: Not a directory; choose another with --run"):
        RunFolder.create(config, "1")


def test_a_folder_without_training_is_not_resumed_and_stays_unchanged(config, capsys):
    folder = RunFolder.create(config, __version__)
    folder.metrics.write({"step": 0})
    folder.episodes.write(trajectory(), split="train")
    folder.close()
    before = written(folder)
    assert main(["train", "--resume", str(folder.path)]) == 2
    assert "is a run that cannot be resumed" in capsys.readouterr().err
    with pytest.raises(StoreError, match="is a run that cannot be resumed"):
        last_checkpoint(folder.path, config)
    assert written(folder) == before
    assert len(Recording(folder.path).episodes) == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 3, "recorded": True}, "was made by --train-only and has no rollouts to resume; start a new run"),
        ({"step": 3}, "has completed 3 rollouts, more than --num-rollout 1; set --num-rollout to at least 3"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused(config, state, message):
    folder = RunFolder.create(config, __version__)
    folder.save(3, state, lambda path: path.mkdir())
    folder.close()
    fewer = replace(config, rollout=replace(config.rollout, num_rollout=1))
    with pytest.raises(ConfigError, match=message):
        last_checkpoint(folder.path, fewer)


def test_a_finished_run_may_be_resumed_with_its_own_num_rollout(config):
    folder = RunFolder.create(config, __version__)
    folder.save(3, {"step": 3}, lambda path: path.mkdir())
    folder.close()
    same = replace(config, rollout=replace(config.rollout, num_rollout=3))
    assert last_checkpoint(folder.path, same).state["step"] == 3
