"""The trainer's rank processes as the controller sees them: started, commanded, watched, stopped.

Each rank is a process at one end of a connection: the death of either side is the other's end of file. rank_place.py starts ranks as children
of this process, nodes.py on other machines. A command goes to all ranks at once. A rank that died, hung or raised ends the wait for answers with
a WorkerError that holds the end of its log. All ranks are stopped then, since their process group cannot be repaired.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from agentrl.errors import WorkerError
from agentrl.train.megatron.lora import Lora
from agentrl.train.megatron.rank_place import RankPlace, RankProcess

LOG_LINES = 30


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank needs to start."""

    model: Path
    """Hugging Face folder"""
    megatron: Mapping[str, Any]
    """settings by megatron's field names"""
    dtype: str
    """float32 or bfloat16"""
    reference: bool
    """keep a frozen copy of the model"""
    tree_packing: bool
    """compute a prefix that rows of a micro-batch share once"""
    critic: bool
    """a value model"""
    lora: Lora | None
    """train adapters only; None: all weights"""
    true_on_policy: bool
    """compute log-probs with the local engine's arithmetic"""
    seed: int
    threads: int
    """CPU threads"""
    rank: int
    local_rank: int
    """the index of its GPU"""
    world: int
    host: str
    port: int
    """host and port of the store where the ranks meet"""
    timeout_s: float
    """time limit of collective operations"""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank's place in the model."""

    data_parallel_rank: int
    context_parallel_rank: int
    pipeline_rank: int
    reports: bool
    """its results are those of its data-parallel share, or of its context-parallel part of it"""
    multiple: int
    """the tokens of a micro-batch are padded to a multiple of this"""
    device: str = ""
    """name of the GPU; empty: a CPU"""


class WrittenFile(NamedTuple):
    """A file of tensors that a rank has written."""

    name: str
    tensors: list[str]
    bytes: int


class RankPool:
    """A rank's process in each of `places`, with logs in `folder`/rank{r}.log."""

    def __init__(self, places: Sequence[RankPlace], folder: Path, threads: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{rank}.log" for rank in range(len(places))]
        self.processes: list[RankProcess] = []
        self.connections: list[Connection] = []
        self._reason = ""
        """the failure for which the ranks were stopped"""
        self._lock = threading.RLock()
        """one command at a time, from any thread"""
        try:
            for rank, place in enumerate(places):
                self.processes.append(place.start(rank, self.logs[rank], threads))
                self.connections.append(self.processes[-1].connection)
        except BaseException:
            self.close()
            raise

    def request(self, command: str, arguments: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Any]:
        """Send `command` to every rank with its own arguments; returns the results by rank.

        Raises:
            WorkerError: a rank died, raised, or did not answer in time. All ranks are stopped.
            UsageError, StoreError: a rank refused what a user wrote, or a checkpoint. All ranks are stopped.
            OSError: the machine lacks what a rank needs, as space on its disk. All ranks are stopped.
        """
        with self._lock:
            if not self.connections:
                raise WorkerError(f"{command}: the trainer's workers have been stopped{self._reason}")
            try:
                for rank, connection in enumerate(self.connections):
                    try:
                        connection.send((command, dict(arguments[rank])))
                    except OSError:
                        self._raise_died(command, rank)
                return self._receive_all(command, timeout_s)
            except BaseException as e:
                self._reason = f", since {e}" if str(e) else ""
                self.close(grace_s=0)
                raise

    def _receive_all(self, command: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        ranks = range(len(self.connections))
        deadline = time.monotonic() + timeout_s
        while len(results) < len(ranks):
            missing = [r for r in ranks if r not in results]
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{command}: rank {missing[0]} did not answer within {timeout_s:g} s{self._log_tail(missing[0])}"
                )
            ready = wait([self.connections[r] for r in missing], timeout=1.0)
            for rank in missing:
                if self.connections[rank] in ready:
                    results[rank] = self._receive(command, rank)
                elif self.processes[rank].ended(0) and not self.connections[rank].poll():  # its helper holds the socket
                    self._raise_died(command, rank)
        return [results[r] for r in ranks]

    def _receive(self, command: str, rank: int) -> Any:
        try:
            kind, value = self.connections[rank].recv()
        except (EOFError, OSError):
            self._raise_died(command, rank)
        if kind == "usage":
            raise value
        if kind == "machine":
            raise OSError(value.errno, value.strerror, value.filename or f"in rank {rank} of the trainer")
        if kind == "error":
            self._raise_error(command, rank, value)
        return value

    def _raise_error(self, command: str, rank: int, traceback: str) -> NoReturn:
        """Raise for a rank that raised. If another rank died, that was the cause, and it is named instead."""
        for other, process in enumerate(self.processes):
            if other != rank and process.ended(0.5) is not None:
                self._raise_died(command, other)
        raise WorkerError(f"{command}: rank {rank} raised\n{traceback.rstrip()}")

    def _raise_died(self, command: str, rank: int) -> NoReturn:
        event = self.processes[rank].ended(5.0) or "closed its connection or hung in the middle of a message"
        raise WorkerError(f"{command}: rank {rank} {event}{self._log_tail(rank)}") from None

    def _log_tail(self, rank: int) -> str:
        lines = self.logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"; the end of {self.logs[rank]}:\n" + "\n".join(lines) if lines else f"; {self.logs[rank]} is empty"

    def close(self, grace_s: float = 5.0) -> None:
        """Close the connections, which ends the ranks, then kill what is left of their process groups; idempotent."""
        for connection in self.connections:
            connection.close()
        self.connections = []
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            process.ended(max(0.0, deadline - time.monotonic()))
            process.kill()
        self.processes = []
