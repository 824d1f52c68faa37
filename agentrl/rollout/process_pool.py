"""Episodes in several processes, for when one core is not enough: to `Rollout` they look like one runner.

Groups, retries, places and the table of causes stay with the controller (rollout/rollout.py), so nothing of them depends on how many processes there
are. A process is given a spec and gives back the trajectory; all members of a group are played in the same one. A process that died, or
gave no sign of life, is replaced and asked again what it had not answered: the same specs, hence the same seeds.

A message is a pickle behind its kind, the number of its question and its length, on a socket pair, so either side's death is the other's end
of file. The processes' own side is rollout/process_worker.py.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any

from agentrl.errors import DataError, WorkerError
from agentrl.reward import Scorer
from agentrl.rollout.episode import carry_task
from agentrl.rollout.process_worker import BEAT_S, Channel, Kind, Make, serve
from agentrl.types import EpisodeSpec, Trajectory

logger = logging.getLogger(__name__)

START_S = 300.0
"""until a process has imported and made what it needs"""
SILENCE_S = 60.0
"""without a sign of life; a process that gives none is hung: something in it blocks its event loop"""
CLOSE_S = 120.0
"""until what runs in a process is closed"""
END_S = 5.0
MAX_DEATHS = 3
"""of one process in one rollout; the next one ends the run"""
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy threads' locks


class RunnerProcesses:
    """`count` processes, started when first needed, and what they have in common.

    Args:
        make: see `Make`.
        scorer: of whole groups, which are scored here.
        heard: called with what the runners `tell`.
    """

    def __init__(self, make: Make, count: int, scorer: Scorer, *, heard: Callable[[Any], None]) -> None:
        self.make, self.scorer, self.heard = make, scorer, heard
        self.deaths: Counter[tuple[str, str]] = Counter()
        """rows of the table of causes, since the rollout began"""
        self._processes = [_Process(self, number) for number in range(count)]

    @asynccontextmanager
    async def rollout(self, settings: Any) -> AsyncIterator[RemoteRunner]:
        """A runner for the episodes of one rollout. Before and after it nothing runs in the processes and no engine hears of them.

        Raises:
            WorkerError: a process cannot be started.
        """
        self.deaths = Counter()
        order = pickle.dumps(settings)
        try:
            await asyncio.gather(*(p.open(order) for p in self._processes))
            yield RemoteRunner(self._processes, self.scorer)
        finally:
            await asyncio.gather(*(p.close_rollout() for p in self._processes))

    async def close(self) -> None:
        """End all processes; idempotent."""
        await asyncio.gather(*(p.close() for p in self._processes))


class RemoteRunner:
    """Plays episodes in the processes."""

    def __init__(self, processes: list[_Process], scorer: Scorer) -> None:
        self.scorer = scorer
        self._processes = processes
        self._where: dict[int, _Process] = {}
        """of each group of the rollout"""

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """As `EpisodeRunner.run`."""
        spec = await carry_task(spec)  # the record is to hold what the process saw
        process = self._where.get(spec.group_index)
        if process is None:
            process = self._where[spec.group_index] = min(self._processes, key=lambda p: len(p.asked))
        try:
            payload = pickle.dumps(spec)
        except (pickle.PicklingError, TypeError, AttributeError) as e:
            raise DataError(f"task {spec.task.id} cannot be sent to a runner process: {e}") from e
        trajectory: Trajectory = await process.ask(Kind.RUN, payload)
        return replace(trajectory, task=spec.task)


@dataclass(slots=True)
class _Question:
    """Asked and not answered."""

    kind: Kind
    payload: bytes
    answer: asyncio.Future[tuple[Kind, bytes]]


class _Process:
    """One process, and after it those that take its place."""

    def __init__(self, owner: RunnerProcesses, number: int) -> None:
        self.asked: dict[int, _Question] = {}
        """what is not answered, in order"""
        self._owner, self._name = owner, f"runner process {number}"
        self._count = 0
        self._deaths = 0
        self._order: bytes | None = None
        """settings of the rollout under way"""
        self._failed: Exception | None = None
        """why this rollout cannot go on"""
        self._process: multiprocessing.process.BaseProcess | None = None
        self._channel: Channel | None = None
        self._hang_up: Callable[[], Any] = lambda: None
        self._sign = asyncio.Event()
        """of life, since `_watch` looked last"""
        self._listener: asyncio.Task[None] | None = None

    async def open(self, order: bytes) -> None:
        """A rollout begins."""
        self._deaths, self._failed, self._order = 0, None, order
        await self.ask(Kind.OPEN, order)

    async def ask(self, kind: Kind, payload: bytes = b"") -> Any:
        """What the process answers, or the one that took its place."""
        if self._failed is not None:
            raise self._failed
        self._count += 1
        number = self._count
        question = self.asked[number] = _Question(kind, payload, asyncio.get_running_loop().create_future())
        try:
            if self._process is None:
                await self._start()
            elif self._channel is not None:  # else it is being replaced, and the next one is asked
                self._channel.send(kind, number, payload)
                with suppress(OSError):  # gone: as before
                    await self._channel.drain()
            kind, answer = await question.answer
        except asyncio.CancelledError:
            if self._channel is not None:
                self._channel.send(Kind.CANCEL, number, b"")
            raise
        finally:
            del self.asked[number]
        value = pickle.loads(answer)
        if kind is Kind.RAISED:
            raise value
        return value

    async def close_rollout(self) -> None:
        """Nothing runs in it afterwards."""
        self._order = self._failed = None
        if self._process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.ask(Kind.CLOSE)
        except TimeoutError:
            await self.close()

    async def close(self) -> None:
        """End the process."""
        self._order = None
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self._end()

    # -- the process -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start one and ask it all that is not answered."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _SPAWN.Process(target=serve, args=(self._owner.make, theirs, os.getpid()), name=self._name)
            self._hang_up = Finalize(
                self, _shut, (ours,), exitpriority=1
            )  # also at exit, where processes are waited for
            self._process.start()
        channel = self._channel = await Channel.over(ours)
        self._listener = asyncio.create_task(self._listen(channel))
        if self._order is not None and all(q.kind is not Kind.OPEN for q in self.asked.values()):
            channel.send(Kind.OPEN, 0, self._order)
        for number, q in self.asked.items():
            channel.send(q.kind, number, q.payload)

    async def _listen(self, channel: Channel) -> None:
        """Take answers until the process is gone, then see to another."""
        how = ""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self._take(*await channel.receive())
        except (EOFError, OSError):
            how = watch.result() if watch.done() else ""
        finally:
            watch.cancel()
        code = await self._end()
        await self._gone(how or _how(code))

    async def _watch(self) -> str:
        """Kill the process once it gives no sign of life for long; what to say of it then."""
        patience = START_S
        while True:
            self._sign.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._sign.wait()
            await asyncio.sleep(BEAT_S)  # if it was this process that stood still, what came meanwhile is taken now
            if not self._sign.is_set():
                assert self._process is not None
                self._process.kill()
                return f"gave no sign of life for {patience:g} s: something in it blocks its event loop"
            patience = SILENCE_S

    def _take(self, kind: Kind, number: int, payload: bytes) -> None:
        self._sign.set()
        question = self.asked.get(number)
        if kind is Kind.TOLD:
            word = pickle.loads(payload)
            if word is not None:
                self._owner.heard(word)
        elif question is not None and not question.answer.done():
            question.answer.set_result((kind, payload))
        elif number == 0 and kind is Kind.RAISED:
            self._fail(pickle.loads(payload))

    async def _gone(self, how: str) -> None:
        if self._order is None:  # the rollout was over but for the good-bye; the next one starts a process
            for q in self.asked.values():
                if not q.answer.done():
                    q.answer.set_result((Kind.DONE, pickle.dumps(None)))
            return
        self._deaths += 1
        self._owner.deaths["(runner process died)", how] += 1
        lost = f"{self._name} {how}, with {len(self.asked)} unfinished episodes"
        if self._deaths > MAX_DEATHS:
            self._fail(WorkerError(f"{lost}; it was replaced {MAX_DEATHS} times in this rollout already"))
            return
        logger.warning("%s; they are started again", lost)
        try:
            await self._start()
        except OSError as e:
            self._fail(WorkerError(f"{lost}; no other could be started: {e}"))

    def _fail(self, error: Exception) -> None:
        """Nothing that is asked in this rollout will be answered."""
        self._failed = error
        for q in self.asked.values():
            if not q.answer.done():
                q.answer.set_exception(error)

    async def _end(self) -> int | None:
        """Hang up, at which it ends, or kill it; its status if it ended by itself."""
        process, channel = self._process, self._channel
        if process is None:
            return None
        self._channel = None
        self._hang_up()
        if channel is not None:
            channel.close()
        await asyncio.to_thread(process.join, END_S)
        code = process.exitcode
        if code is None:
            process.kill()
            await asyncio.to_thread(process.join)
        self._process = None
        return code


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _how(code: int | None) -> str:
    if code is None:
        return "hung up"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
