"""The worker processes of a trainer, as the controller sees them: started, asked, watched, stopped.

Every rank is a child with one end of a socket pair, so there is nothing to accept and nobody else can connect, and either side's death is the
other's end of file. A question goes to all ranks at once; waiting watches sockets and processes together, so a rank that died, hung or
raised ends the wait with a WorkerError that holds the end of its log, and all ranks are stopped: their process group cannot be mended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from agentrl.errors import WorkerError

LOG_LINES = 30
STALL_S = 60
"""a rank that neither takes nor gives a byte of a message for so long is taken for hung"""


class Workers:
    """`world` processes running `agentrl.train.megatron.rank_process`, with logs in `folder`/rank{r}.log."""

    def __init__(self, world: int, folder: Path, threads: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{r}.log" for r in range(world)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self._why = ""
        """the failure that stopped them"""
        self._asking = threading.RLock()
        """one question at a time, from whatever thread"""
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
        root = str(Path(__file__).parents[3])  # workers find this very package, installed or not
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron needs it for tensor parallelism
        env.setdefault("NCCL_CUMEM_ENABLE", "0")  # else no NCCL group with an engine's process can be formed
        try:
            for log in self.logs:
                self._spawn(log, env)
        except BaseException:
            self.close()
            raise

    def _spawn(self, log: Path, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        for option in (
            socket.SO_SNDTIMEO,
            socket.SO_RCVTIMEO,
        ):  # of single reads and writes: a hung rank may stop amid a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))
        with ours, theirs, log.open("ab") as out:
            command = [
                sys.executable,
                "-m",
                "agentrl.train.megatron.rank_process",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(env),
                start_new_session=True,
            )
            self.processes.append(process)
            self.connections.append(Connection(ours.detach()))

    def ask(self, command: str, arguments: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Any]:
        """Send `command` to every rank with its own arguments and return the answers by rank.

        Raises:
            WorkerError: a rank died, raised, or did not answer in time. All ranks are stopped then.
            UsageError: a rank found something wrong that a person wrote. Likewise.
        """
        with self._asking:
            return self._ask(command, arguments, timeout_s)

    def _ask(self, command: str, arguments: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Any]:
        if not self.connections:
            raise WorkerError(f"{command}: the trainer's workers have been stopped{self._why}")
        try:
            for rank, connection in enumerate(self.connections):
                sent = False
                with contextlib.suppress(OSError):
                    connection.send((command, dict(arguments[rank])))
                    sent = True
                if not sent:
                    self._died(command, rank)
            return self._collect(command, timeout_s)
        except BaseException as e:
            self._why = f", since {e}" if str(e) else ""
            self.close(grace_s=0)
            raise

    def _collect(self, command: str, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self.connections):
            missing = [r for r in range(len(self.connections)) if r not in answers]
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{command}: rank {missing[0]} did not answer within {timeout_s:g} s{self._tail(missing[0])}"
                )
            for ready in wait([self.connections[r] for r in missing], timeout=1.0):
                rank = self.connections.index(ready)  # type: ignore[arg-type]
                answers[rank] = self._receive(command, rank)
            for rank in range(len(self.processes)):
                if (
                    rank not in answers
                    and self.processes[rank].poll() is not None
                    and not self.connections[rank].poll()
                ):
                    self._died(command, rank)
        return [answers[r] for r in range(len(self.connections))]

    def _receive(self, command: str, rank: int) -> Any:
        kind: str = "gone"
        value: Any = None
        with contextlib.suppress(EOFError, OSError):
            kind, value = self.connections[rank].recv()
        if kind == "gone":
            self._died(command, rank)
        if kind == "usage":
            raise value
        if kind == "error":
            self._raised(command, rank, value)
        return value

    def _raised(self, command: str, rank: int, text: str) -> NoReturn:
        """A rank raised; but if another rank died, that is why, and it is the one to name."""
        for other, process in enumerate(self.processes):
            if other != rank and _code(process, 0.5) is not None:
                self._died(command, other)
        raise WorkerError(f"{command}: rank {rank} raised\n{text.rstrip()}")

    def _died(self, command: str, rank: int) -> NoReturn:
        code = _code(self.processes[rank], 5.0)
        how = (
            "hung up, or hung amid a message"
            if code is None
            else f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with status {code}"
        )
        raise WorkerError(f"{command}: rank {rank} {how}{self._tail(rank)}")

    def _tail(self, rank: int) -> str:
        lines = self.logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"; the end of {self.logs[rank]}:\n" + "\n".join(lines) if lines else f"; {self.logs[rank]} is empty"

    def close(self, grace_s: float = 5.0) -> None:
        """Hang up, at which ranks end, then kill what is left of their process groups; idempotent."""
        for connection in self.connections:
            connection.close()
        self.connections = []
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            _code(process, max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes = []


def _code(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
