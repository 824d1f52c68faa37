"""A full disk, no descriptors, files that cannot grow: one sentence, and no half file. Whole jobs: tests/e2e/test_job_faults.py."""

import errno
import resource
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.machine_errors import machine_error
from agentrl.store import Recording

RECORDED = Path(__file__).parents[1] / "recorded/run"
SIZE = resource.RLIMIT_FSIZE


def one_sentence(err, command):
    """The last line is a sentence of the command; warnings may precede it."""
    assert "Traceback" not in err, err[-2000:]
    last = err.splitlines()[-1]
    assert last.startswith(f"agentrl {command}: "), err[-2000:]
    return last


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "file"), errno.ENOSPC),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"), errno.ENOSPC),
        (RuntimeError("[enforce fail at device.cc:186] rv != -1. -1 vs -1. Too many open files"), errno.EMFILE),
        (
            RuntimeError("Worker failure: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
            errno.EIO,
        ),
        (PermissionError(errno.EACCES, "Permission denied", "file"), errno.EACCES),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "file"), errno.ENOENT),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/x"), errno.ENOTDIR),
        (RuntimeError("No such file or directory"), None),
        (OSError(errno.EPIPE, "Broken pipe"), None),
        (ValueError("File is too large"), None),
    ],
)
def test_which_errors_are_the_machines(error, number):
    found = machine_error(error)
    assert (found and found.errno) == number
    try:
        raise KeyError("wrapped") from error
    except KeyError as e:
        found = machine_error(e)
    assert (found and found.errno) == (None if number in (errno.EACCES, errno.ENOENT, errno.ENOTDIR) else number)


@pytest.mark.parametrize(
    "words",
    [
        ["export", RECORDED, "--parquet", "episodes.parquet"],
        ["export", RECORDED, "--hf-dataset", "data"],
        ["export", RECORDED, "EPISODE", "--html", "page.html"],
    ],
    ids=lambda words: words[-2],
)
def test_a_file_that_cannot_grow_is_one_sentence_and_no_half_file(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(SIZE)
    resource.setrlimit(SIZE, (100, before[1]))
    try:
        status = main([Recording(RECORDED).episodes[0].id if word == "EPISODE" else str(word) for word in words])
    finally:
        resource.setrlimit(SIZE, before)
    assert status == 1
    assert "File too large" in one_sentence(capsys.readouterr().err, words[0])
    assert list(tmp_path.iterdir()) == []
