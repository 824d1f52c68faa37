"""The processes of the benchmark: mocks and client workers, started, asked and stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from benchmarks.overhead.assets import BUILD, ROOT


class Process:
    """A module run as a process that says a line when it is ready."""

    def __init__(self, module: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.overhead.{module}", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{BUILD / 'packages'}"},
        )  # fmt: skip
        self.first = self.line()

    def line(self) -> str:
        """The next line it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")
        return line.strip()

    def ask(self, **work: Any) -> dict[str, Any]:
        """Have a worker do a run."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.line())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()


class Mock(Process):
    """The mock engine."""

    def __init__(self, turns: int, latency_ms: float = 50, drop: float = 0.0) -> None:
        super().__init__("mock", f"--turns={turns}", f"--latency-ms={latency_ms}", f"--drop={drop}")
        self.address = f"http://127.0.0.1:{self.first}"
