"""Kills processes of a run of `agentrl train --use-fault-tolerance` with SIGKILL, and waits for its progress."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from agentrl.core.child_process import children_of
from agentrl.store.checkpoints import checkpoints

TIMEOUT_S = 300.0
POLL_S = 0.02


class Chaos:
    """The processes of a run.

    Args:
        supervisor: the process of the command.
        run: its run folder.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], run: Path) -> None:
        self.supervisor, self.run = supervisor, run

    def pids(self, kind: str) -> list[int]:
        """The living processes of a kind: controller or rank."""
        controllers = children_of(self.supervisor.pid)
        if kind == "controller":
            return [pid for pid in controllers if _runs(pid, "agentrl.cli")]
        return [pid for c in controllers for pid in children_of(c) if _runs(pid, "rank_process")]

    def kill(self, kind: str, *, after_rollouts: int = 0) -> int:
        """Kill one process of a kind once so many rollouts are in a checkpoint; returns its id, or 0 if the run has ended before."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.supervisor.poll() is None:
            pids = self.pids(kind) if self.rollouts() >= after_rollouts else []
            if pids:
                os.kill(pids[0], signal.SIGKILL)
                return pids[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind} after {after_rollouts} rollouts within {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return 0

    def rollouts(self) -> int:
        """Rollouts in the last checkpoint."""
        found = checkpoints(self.run)
        return int(found[-1].name) if found else 0


def _runs(pid: int, what: str) -> bool:
    """Whether a living process runs a module."""
    try:
        return what in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return False
