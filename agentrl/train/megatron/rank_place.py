"""Where a trainer's ranks run: a place starts a rank's process and returns a handle. This module: as a child of this process.

nodes.py has the places on other machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from agentrl.core.child_process import how_it_ended
from agentrl.core.ports import free_port
from agentrl.core.secret_socket import limit_stalls

RANK = "agentrl.train.megatron.rank_process"
"""the program of a rank"""


class RankProcess(Protocol):
    """A rank's process."""

    connection: Connection
    """its commands and answers; end of file when it has ended"""

    def ended(self, timeout_s: float) -> str | None:
        """How it ended, for which it is given `timeout_s`; None: it runs."""

    def kill(self) -> None:
        """End it, and what it started."""


class RankPlace(Protocol):
    """Room for one rank on some machine."""

    local_rank: int
    """the rank's number on its machine, also the index of its GPU"""

    def start(self, rank: int, log: Path, threads: int) -> RankProcess:
        """Start the rank's process, whose output goes into `log`.

        Raises:
            WorkerError: it cannot be started.
        """

    def rendezvous(self) -> tuple[str, int]:
        """Host and free port at which the ranks can meet if rank 0 is here."""


class LocalRank:
    """A rank's process as a child of this one, `module` run with the file descriptor of its end of the connection."""

    def __init__(self, theirs: int, log: Path, threads: int, module: str = RANK) -> None:
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs), str(os.getpid())],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(threads),
                start_new_session=True,
            )

    def ended(self, timeout_s: float) -> str | None:
        try:
            return how_it_ended(self.process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class ConnectedRank(LocalRank):
    """A child at the other end of a socket pair: no port is open."""

    def __init__(self, log: Path, threads: int, module: str = RANK) -> None:
        ours, theirs = socket.socketpair()
        limit_stalls(ours)  # a rank may hang in the middle of a message
        with ours, theirs:
            super().__init__(theirs.fileno(), log, threads, module)
            self.connection = Connection(ours.detach())


class ThisMachine:
    """Room for a rank among the children of this process. `host`: an address at which other machines reach this one."""

    def __init__(self, local_rank: int, host: str = "127.0.0.1") -> None:
        self.local_rank, self._host = local_rank, host

    def start(self, rank: int, log: Path, threads: int) -> RankProcess:
        return ConnectedRank(log, threads)

    def rendezvous(self) -> tuple[str, int]:
        return self._host, free_port()


def _environment(threads: int) -> Mapping[str, str]:
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    root = str(Path(__file__).parents[3])  # ranks import this very package, installed or not
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron requires it for tensor parallelism
    env.setdefault("NCCL_CUMEM_ENABLE", "0")  # otherwise no NCCL group with an engine's process can be formed
    return env
