"""Processes of `agentrl` that are forked from one that has imported what training needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import read_line


@pytest.fixture(scope="session")
def driven(tmp_path_factory):
    """Runs `agentrl` as drive.py does; returns a process that has ended."""
    folder, number = tmp_path_factory.mktemp("driven"), 0
    words = [sys.executable, str(Path(__file__).parent / "drive.py"), "serve"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def drive(when, at, *words):
        nonlocal number
        number += 1
        output = folder / f"{number}.txt"
        server.stdin.write(json.dumps([when, at, list(map(str, words)), str(output)]) + "\n")
        server.stdin.flush()
        code = int(read_line(server, timeout_s=600))
        return subprocess.CompletedProcess(words, code, output.read_text(), "")

    yield drive
    server.stdin.close()
    server.wait(30)
    server.stdout.close()
