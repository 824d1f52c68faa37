"""Episodes in several processes, for when one core is not enough. To `Rollout` they look like one runner.

Groups, retries, slots and the table of causes stay in the controller (rollout/rollout.py), so they do not depend on the number of processes.
A process receives a spec and returns the trajectory; all members of a group are played in the same process. A process that dies or sends no
heartbeat is replaced, and the new one receives the unanswered requests: the same specs, hence the same seeds.

A message on the socket is a header (kind, request number, length) and a pickle. Either side sees the other's death as end of file. The
process's side is rollout/process_worker.py. Processes are children of this one, or actors of a ray cluster (rollout/ray_processes.py).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any, Protocol

from agentrl.core.child_process import how_it_ended
from agentrl.core.message_channel import Channel, MessageKind
from agentrl.errors import DataError, WorkerError
from agentrl.reward import Scorer
from agentrl.rollout.first_prompt import load_task_images
from agentrl.rollout.mixed_runner import MixedScorer
from agentrl.rollout.process_worker import HEARTBEAT_S, RunnerFactory, serve
from agentrl.types import EpisodeSpec, Trajectory

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Time limit of the connection, and of the first heartbeat, which follows the imports and the runner factory."""
HEARTBEAT_TIMEOUT_S = 60.0
"""A process without a heartbeat for this time is replaced: its event loop is blocked."""
CLOSE_TIMEOUT_S = 120.0
"""Time limit for ending a rollout in a process."""
JOIN_TIMEOUT_S = 5.0
"""A process is killed this long after its socket was closed."""
MAX_DEATHS = 3
"""Deaths of one process that are tolerated in one rollout; one more ends the run."""
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads


class RunnerProcess(Protocol):
    """A process of the pool, wherever it runs."""

    async def connect(self) -> socket.socket:
        """The socket to the process, once it has connected.

        Raises:
            OSError: it has ended, or does not connect in time.
        """

    def kill(self) -> None:
        """End it at once."""

    async def end(self) -> str:
        """End it after its socket was closed, by a kill if it does not end itself; returns how it ended."""


class ProcessPlace(Protocol):
    """Where the processes of a pool run."""

    def start(self, factory: RunnerFactory, number: int) -> RunnerProcess:
        """Start process `number`, or the one that replaces it.

        Raises:
            OSError: it cannot be started.
        """

    def release(self) -> None:
        """Give the room back; idempotent."""


class ThisMachine:
    """Processes as children of this one."""

    def start(self, factory: RunnerFactory, number: int) -> RunnerProcess:
        """See `ProcessPlace.start`."""
        return LocalProcess(factory, number)

    def release(self) -> None:
        """There is nothing to give back."""


class LocalProcess:
    """A child of this process, at the other end of a socket pair."""

    def __init__(self, factory: RunnerFactory, number: int) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = (factory, theirs, os.getpid())
            self._process = _SPAWN.Process(target=serve, args=arguments, name=f"runner process {number}")
            # also at exit, where multiprocessing waits for its processes
            self._shut = Finalize(self, _shut, (self._socket,), exitpriority=1)
            self._process.start()

    async def connect(self) -> socket.socket:
        """See `RunnerProcess.connect`."""
        return self._socket

    def kill(self) -> None:
        """See `RunnerProcess.kill`."""
        self._process.kill()

    async def end(self) -> str:
        """See `RunnerProcess.end`."""
        self._shut()
        await asyncio.to_thread(self._process.join, JOIN_TIMEOUT_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        return how_it_ended(code)


class ProcessPool:
    """Runner processes, started when first needed.

    Args:
        factory: creates the runners in each process.
        count: number of processes.
        scorer: scores whole groups, in the controller.
        servers: the current addresses of the servers, to which the processes attach.
        on_notice: called with the notices of the runners.
        place: where the processes run.
    """

    def __init__(
        self,
        factory: RunnerFactory,
        count: int,
        scorer: Scorer | MixedScorer,
        *,
        servers: Callable[[], Sequence[str]],
        on_notice: Callable[[Any], None],
        place: ProcessPlace | None = None,
    ) -> None:
        self.factory, self.scorer, self.servers, self.on_notice = factory, scorer, servers, on_notice
        self.place = place or ThisMachine()
        self.deaths: Counter[tuple[str, str]] = Counter()
        """rows for the table of causes, since the rollout began"""
        self._processes = [_Process(self, number) for number in range(count)]

    @asynccontextmanager
    async def rollout(self, settings: Any) -> AsyncIterator[RemoteRunner]:
        """A runner for the episodes of one rollout. Outside of it nothing runs in the processes and no engine is called.

        Raises:
            WorkerError: a process cannot be started.
        """
        self.deaths = Counter()
        try:
            await asyncio.gather(*(p.open_rollout(settings) for p in self._processes))
            yield RemoteRunner(self._processes, self.scorer)
        finally:
            await asyncio.gather(*(p.close_rollout() for p in self._processes))

    def servers_moved(self) -> None:
        """Tell the processes of a rollout in progress where the servers are now."""
        for process in self._processes:
            process.send_servers()

    async def close(self) -> None:
        """End all processes; idempotent."""
        await asyncio.gather(*(p.close() for p in self._processes))
        self.place.release()


class RemoteRunner:
    """Plays episodes in the processes of a pool."""

    def __init__(self, processes: list[_Process], scorer: Scorer | MixedScorer) -> None:
        self.scorer = scorer
        self._processes = processes
        self._process_of: dict[int, _Process] = {}
        """process of each group, by group index"""

    async def run(self, spec: EpisodeSpec) -> Trajectory:
        """See `EpisodeRunner.run`."""
        spec = await load_task_images(spec)  # so that the record holds what the process sees
        process = self._process_of.get(spec.group_index)
        if process is None:
            process = self._process_of[spec.group_index] = min(self._processes, key=lambda p: len(p.pending))
        try:
            payload = pickle.dumps(spec)
        except (pickle.PicklingError, TypeError, AttributeError) as e:
            raise DataError(f"task {spec.task.id} cannot be sent to a runner process: {e}") from e
        trajectory: Trajectory = await process.request(MessageKind.RUN, payload)
        return replace(trajectory, task=spec.task)


@dataclass(slots=True)
class _Request:
    kind: MessageKind
    payload: bytes
    answer: asyncio.Future[tuple[MessageKind, bytes]]


class _Process:
    """One process of the pool, and those that replace it."""

    def __init__(self, pool: ProcessPool, number: int) -> None:
        self.pending: dict[int, _Request] = {}
        """unanswered requests by number, in order"""
        self._pool, self._number = pool, number
        self._requests = 0
        self._deaths = 0
        self._rollout_settings: Any = None
        """settings of the rollout in progress"""
        self._error: Exception | None = None
        """the error that ended this rollout"""
        self._process: RunnerProcess | None = None
        self._channel: Channel | None = None
        """None: it has not connected; then it is sent all pending requests"""
        self._heartbeat = asyncio.Event()
        """a message has arrived since `_watch` last cleared it"""
        self._life: asyncio.Task[None] | None = None
        """runs a process, and those that replace it"""

    async def open_rollout(self, settings: Any) -> None:
        self._deaths, self._error, self._rollout_settings = 0, None, settings
        await self.request(MessageKind.OPEN, self._opening())

    def _opening(self) -> bytes:
        """What a process receives when a rollout begins, or when it replaces another."""
        return pickle.dumps((self._rollout_settings, tuple(self._pool.servers())))

    def send_servers(self) -> None:
        if self._channel is not None and self._rollout_settings is not None:
            self._channel.send(MessageKind.SERVERS, 0, pickle.dumps(tuple(self._pool.servers())))

    async def request(self, kind: MessageKind, payload: bytes = b"") -> Any:
        """The answer of the process, or of the one that replaces it."""
        if self._error is not None:
            raise self._error
        self._requests += 1
        number = self._requests
        request = self.pending[number] = _Request(kind, payload, asyncio.get_running_loop().create_future())
        try:
            if self._life is None or self._life.done():
                self._life = asyncio.create_task(self._live())
                self._life.add_done_callback(self._note_end)
            elif self._channel is not None:
                self._channel.send(kind, number, payload)
                with suppress(OSError):  # the process is gone: the next one gets all pending requests
                    await self._channel.drain()
            kind, answer = await request.answer
        except asyncio.CancelledError:
            if self._channel is not None:
                self._channel.send(MessageKind.CANCEL, number, b"")
            raise
        finally:
            del self.pending[number]
        value = pickle.loads(answer)
        if kind is MessageKind.ERROR:
            raise value
        return value

    async def close_rollout(self) -> None:
        """End all episodes of the rollout in the process."""
        self._rollout_settings = self._error = None
        if self._channel is None:  # nothing runs, or it has not connected
            await self.close()
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.request(MessageKind.CLOSE)
        except TimeoutError:
            await self.close()

    async def close(self) -> None:
        """End the process."""
        self._rollout_settings = None
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        await self._end()

    # -- the process -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Run a process, and others in its place while a rollout needs one."""
        how = ""
        while True:
            try:
                process = self._process = self._pool.place.start(self._pool.factory, self._number)
                how = await self._run(process)
            except (OSError, WorkerError) as e:
                before = f"{self._report(how)}; another process" if how else f"runner process {self._number}"
                self._fail(WorkerError(f"{before} could not be started: {e}"))
                await self._end()
                return
            if not self._replaced(how):
                return

    def _note_end(self, life: asyncio.Task[None]) -> None:
        """Raise what ended `_live` where answers are awaited."""
        if not life.cancelled() and (error := life.exception()) is not None:
            self._fail(WorkerError(f"runner process {self._number} cannot be used: {error!r}"))

    async def _run(self, process: RunnerProcess) -> str:
        """Send the process all pending requests and handle its messages until it is gone; returns how it ended."""
        watch: asyncio.Task[str] | None = None
        how = ""
        try:
            channel = self._channel = await Channel.over(await process.connect())
            watch = asyncio.create_task(self._watch(process))
            if self._rollout_settings is not None and all(
                r.kind is not MessageKind.OPEN for r in self.pending.values()
            ):
                channel.send(MessageKind.OPEN, 0, self._opening())
            for number, request in self.pending.items():
                channel.send(request.kind, number, request.payload)
            self.send_servers()  # they may have moved since a pending request was made
            while True:
                self._handle(*await channel.receive())
        except (EOFError, OSError):
            how = watch.result() if watch is not None and watch.done() else ""
        finally:
            if watch is not None:
                watch.cancel()
        ended = await self._end()
        return how or ended

    async def _watch(self, process: RunnerProcess) -> str:
        """Kill the process when its heartbeats stop, and return what to report."""
        timeout_s = START_TIMEOUT_S
        while True:
            self._heartbeat.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._heartbeat.wait()
            await asyncio.sleep(HEARTBEAT_S)  # if the controller itself was blocked, it reads what has arrived now
            if not self._heartbeat.is_set():
                process.kill()
                return f"sent no heartbeat for {timeout_s:g} s: something blocks its event loop"
            timeout_s = HEARTBEAT_TIMEOUT_S

    def _handle(self, kind: MessageKind, number: int, payload: bytes) -> None:
        self._heartbeat.set()
        request = self.pending.get(number)
        if kind is MessageKind.NOTICE:
            notice = pickle.loads(payload)
            if notice is not None:
                self._pool.on_notice(notice)
        elif request is not None and not request.answer.done():
            request.answer.set_result((kind, payload))
        elif number == 0 and kind is MessageKind.ERROR:
            self._fail(pickle.loads(payload))

    def _report(self, how: str) -> str:
        return f"runner process {self._number} {how}, with {len(self.pending)} unfinished episodes"

    def _replaced(self, how: str) -> bool:
        """Whether another process is started after one that ended: a rollout needs it, and not too many have ended."""
        if self._rollout_settings is None:  # only CLOSE is pending, and the next rollout starts a process
            for request in self.pending.values():
                if not request.answer.done():
                    request.answer.set_result((MessageKind.RESULT, pickle.dumps(None)))
            return False
        self._deaths += 1
        self._pool.deaths["(runner process died)", how] += 1
        if self._deaths > MAX_DEATHS:
            self._fail(WorkerError(f"{self._report(how)}; it was replaced {MAX_DEATHS} times in this rollout already"))
            return False
        logger.warning("%s; they are started again", self._report(how))
        return True

    def _fail(self, error: Exception) -> None:
        """Raise the error in all requests of this rollout."""
        self._error = error
        for request in self.pending.values():
            if not request.answer.done():
                request.answer.set_exception(error)

    async def _end(self) -> str:
        """Close the socket, which ends the process; returns how it ended."""
        process, channel = self._process, self._channel
        self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return ""
        how = await process.end()
        self._process = None
        return how


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
