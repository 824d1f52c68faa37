"""What a policy or a server wrote cannot control the terminal; errors of the machine are one sentence."""

import errno
import logging
import subprocess
import sys

import pytest

from agentrl.cli.common import print_now
from agentrl.cli.main import main
from agentrl.core.terminal_text import printable
from agentrl.errors import EngineFailure, UsageError
from agentrl.run.run_log import warnings_on_stderr

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rgone\x00 \u202eabc \ud800"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\rgone\x00 \u202eabc \ud800"


def test_control_characters_are_visible_and_text_is_unchanged():
    assert printable(HOSTILE) == SHOWN
    assert printable("a\tb\nüber 東京 🙂") == "a\tb\nüber 東京 🙂"


def test_messages_to_the_user_are_filtered(capsys):
    print_now(HOSTILE)
    assert capsys.readouterr().out == f"{SHOWN}\n"


def test_warnings_are_filtered(capsys):
    with warnings_on_stderr():
        logging.getLogger("agentrl.test").warning("server: %s", HOSTILE)
    assert capsys.readouterr().err == f"WARNING: server: {SHOWN}\n"


def raising(error, monkeypatch):
    def run(args, rest):
        raise error

    monkeypatch.setattr("agentrl.cli.help_command.run_help", run, raising=True)


def test_errors_of_servers_are_filtered(capsys, monkeypatch):
    raising(EngineFailure(HOSTILE), monkeypatch)
    assert main(["help", "lr"]) == 1
    assert capsys.readouterr().err == f"agentrl help: EngineFailure: {SHOWN}\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENOENT])
def test_an_error_of_the_machine_is_one_sentence(capsys, monkeypatch, number):
    raising(OSError(number, "it failed", "run/episodes"), monkeypatch)
    assert main(["help", "lr"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("agentrl help: it failed (run/episodes); ")


def test_an_error_of_the_machine_in_several_tasks_is_one_sentence(capsys, monkeypatch):
    full = OSError(errno.ENOSPC, "it failed", "run/episodes")
    raising(ExceptionGroup("tasks", [ExceptionGroup("inner", [full]), full]), monkeypatch)
    assert main(["help", "lr"]) == 1
    assert capsys.readouterr().err.startswith("agentrl help: it failed (run/episodes); free some space")


def test_a_path_that_is_too_long_is_bad_input(capsys):
    assert main(["replay", "x" * 5000]) == 2
    assert capsys.readouterr().err.startswith("agentrl replay: File name too long: 'xxx")


def test_long_words_of_an_error_are_cut_after_credentials_are_masked(capsys, monkeypatch):
    raising(UsageError(f"no file {'a' * 399}; {'b' * 399} https://me:{'p' * 500}@host/{'c' * 60}"), monkeypatch)
    assert main(["help", "lr"]) == 2
    err = capsys.readouterr().err
    assert err == f"agentrl help: no file {'a' * 120}…{'a' * 39}; {'b' * 399} https://***@host/{'c' * 60}\n"


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m agentrl.cli help lr | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
