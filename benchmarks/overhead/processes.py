"""The processes of the benchmark: mock engines and client workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.overhead.assets import BUILD, ROOT

_PATH = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(BUILD / "packages")]


class Process:
    """A module run as a process that says a line when it is ready."""

    def __init__(self, module: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.overhead.{module}", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(_PATH)},
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

    def __init__(self, turns: int, latency_ms: float = 50, drop: float = 0.0, *more: str) -> None:
        super().__init__("mock", f"--turns={turns}", f"--latency-ms={latency_ms}", f"--drop={drop}", *more)
        self.address = f"http://127.0.0.1:{self.first}"

    def stats(self) -> dict[str, Any]:
        """Its counts, and the CPU it has taken."""
        with urllib.request.urlopen(f"{self.address}/stats", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


class Script:
    """A client of somebody else's, run anew for each run: FILE --port --episodes --turns --concurrency --variant, which prints one line of JSON
    with `cpu_per_1000_turns` (seconds), `eps_s`, `server_req`, `rss_mb`, `rss_before_mb` and perhaps `cpu_ms_per_turn_at`."""

    def __init__(self, file: Path, variant: str) -> None:
        self.command = [sys.executable, str(file), f"--variant={variant}"]

    def ask(self, address: str, episodes: int, turns: int, concurrency: int) -> dict[str, Any]:
        """As a worker's answer."""
        port = address.rpartition(":")[2]
        flags = [f"--port={port}", f"--episodes={episodes}", f"--turns={turns}", f"--concurrency={concurrency}"]
        done = subprocess.run([*self.command, *flags], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {
            "cpu_ms_per_turn": said["cpu_per_1000_turns"],
            "episodes_per_s": said["eps_s"],
            "done": said["server_req"] // turns,
            "peak_mb": said["rss_mb"],
            "grown_mb": said["rss_mb"] - said["rss_before_mb"],
            "rounds_ms": said.get("cpu_ms_per_turn_at", []),
        }

    def __exit__(self, *_: object) -> None:
        """Nothing is left of it."""
