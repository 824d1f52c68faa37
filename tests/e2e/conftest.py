"""Processes of `agentrl` that are forked from one that has imported what training needs."""

import itertools
import subprocess
from pathlib import Path

import pytest
from forked_jobs import ForkedJobs


@pytest.fixture(scope="session")
def driven(tmp_path_factory):
    """Runs `agentrl` as drive.py does; returns a process that has ended."""
    folder, numbers = tmp_path_factory.mktemp("driven"), itertools.count()
    jobs = ForkedJobs(Path(__file__).with_name("drive.py"))

    def drive(when, at, *words):
        output = folder / f"{next(numbers)}.txt"
        done = jobs.run({"when": when, "at": at, "words": [*map(str, words)], "output": str(output)})
        return subprocess.CompletedProcess(words, done["status"], done["output"], "")

    yield drive
    jobs.close()
