"""The command that messages tell the user to enter."""

import sys

import pytest

from agentrl.core.program_name import command


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A Python in an environment, with agentrl beside it, that the shell does not search."""
    folder = tmp_path / "project/.venv/bin"
    folder.mkdir(parents=True)
    (folder / "agentrl").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def test_it_can_be_entered_as_it_stands(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "project")
    assert command("view", "runs/a b") == ".venv/bin/agentrl view 'runs/a b'"
    monkeypatch.chdir(tmp_path)
    assert command("view", tmp_path) == f"project/.venv/bin/agentrl view {tmp_path}"
    monkeypatch.chdir("/")
    assert command("view") == f"{python.relative_to('/')}/agentrl view"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command("view") == f"{python}/agentrl view"


def test_it_is_short_where_the_shell_finds_it(python, monkeypatch):
    monkeypatch.setenv("PATH", str(python))
    assert command("train", "--resume", "r") == "agentrl train --resume r"
    (python / "agentrl").unlink()
    assert command("view") == "agentrl view"
