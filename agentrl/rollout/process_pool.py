"""Episodes in several processes, for when one core is not enough. To `Rollout` they look like one runner.

Groups, retries, slots and the table of causes stay in the controller (rollout/rollout.py), so they do not depend on the number of processes.
A process receives a spec and returns the trajectory; all members of a group are played in the same process. A process that dies or sends no
heartbeat is replaced, and the new one receives the unanswered requests: the same specs, hence the same seeds.

A message on the socket pair is a header (kind, request number, length) and a pickle. Either side sees the other's death as end of file. The
child side is rollout/process_worker.py.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any

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
"""Time limit of the first heartbeat, which follows the imports and the runner factory."""
HEARTBEAT_TIMEOUT_S = 60.0
"""A process without a heartbeat for this time is replaced: its event loop is blocked."""
CLOSE_TIMEOUT_S = 120.0
"""Time limit for ending a rollout in a process."""
JOIN_TIMEOUT_S = 5.0
"""A process is killed this long after its socket was closed."""
MAX_DEATHS = 3
"""Deaths of one process that are tolerated in one rollout; one more ends the run."""
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads


class ProcessPool:
    """Runner processes, started when first needed.

    Args:
        factory: creates the runners in each process.
        count: number of processes.
        scorer: scores whole groups, in the controller.
        on_notice: called with the notices of the runners.
    """

    def __init__(
        self, factory: RunnerFactory, count: int, scorer: Scorer | MixedScorer, *, on_notice: Callable[[Any], None]
    ) -> None:
        self.factory, self.scorer, self.on_notice = factory, scorer, on_notice
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
        payload = pickle.dumps(settings)
        try:
            await asyncio.gather(*(p.open_rollout(payload) for p in self._processes))
            yield RemoteRunner(self._processes, self.scorer)
        finally:
            await asyncio.gather(*(p.close_rollout() for p in self._processes))

    async def close(self) -> None:
        """End all processes; idempotent."""
        await asyncio.gather(*(p.close() for p in self._processes))


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
        self._pool, self._name = pool, f"runner process {number}"
        self._requests = 0
        self._deaths = 0
        self._rollout_settings: bytes | None = None
        """settings of the rollout in progress, pickled"""
        self._error: Exception | None = None
        """the error that ended this rollout"""
        self._process: multiprocessing.process.BaseProcess | None = None
        self._channel: Channel | None = None
        self._shut_socket: Callable[[], Any] = lambda: None
        self._heartbeat = asyncio.Event()
        """a message has arrived since `_watch` last cleared it"""
        self._listener: asyncio.Task[None] | None = None

    async def open_rollout(self, settings: bytes) -> None:
        self._deaths, self._error, self._rollout_settings = 0, None, settings
        await self.request(MessageKind.OPEN, settings)

    async def request(self, kind: MessageKind, payload: bytes = b"") -> Any:
        """The answer of the process, or of the one that replaces it."""
        if self._error is not None:
            raise self._error
        self._requests += 1
        number = self._requests
        request = self.pending[number] = _Request(kind, payload, asyncio.get_running_loop().create_future())
        try:
            if self._process is None:
                await self._start()
            elif (
                self._channel is not None
            ):  # None while the process is replaced; the next one gets all pending requests
                self._channel.send(kind, number, payload)
                with suppress(OSError):  # the process is gone: as above
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
        if self._process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.request(MessageKind.CLOSE)
        except TimeoutError:
            await self.close()

    async def close(self) -> None:
        """End the process."""
        self._rollout_settings = None
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self._end()

    # -- the process -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start a process and send it all pending requests."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (self._pool.factory, theirs, os.getpid())
            self._process = _SPAWN.Process(target=serve, args=arguments, name=self._name)
            # also at exit, where multiprocessing waits for its processes
            self._shut_socket = Finalize(self, _shut, (ours,), exitpriority=1)
            self._process.start()
        channel = self._channel = await Channel.over(ours)
        self._listener = asyncio.create_task(self._listen(channel))
        if self._rollout_settings is not None and all(r.kind is not MessageKind.OPEN for r in self.pending.values()):
            channel.send(MessageKind.OPEN, 0, self._rollout_settings)
        for number, request in self.pending.items():
            channel.send(request.kind, number, request.payload)

    async def _listen(self, channel: Channel) -> None:
        """Handle messages until the process is gone, then replace it."""
        how = ""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self._handle(*await channel.receive())
        except (EOFError, OSError):
            how = watch.result() if watch.done() else ""
        finally:
            watch.cancel()
        code = await self._end()
        await self._replace(how or how_it_ended(code))

    async def _watch(self) -> str:
        """Kill the process when its heartbeats stop, and return what to report."""
        timeout_s = START_TIMEOUT_S
        while True:
            self._heartbeat.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._heartbeat.wait()
            await asyncio.sleep(HEARTBEAT_S)  # if the controller itself was blocked, it reads what has arrived now
            if not self._heartbeat.is_set():
                assert self._process is not None
                self._process.kill()
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

    async def _replace(self, how: str) -> None:
        """Start another process after one that ended, unless no rollout needs it or too many have ended."""
        if self._rollout_settings is None:  # only CLOSE is pending, and the next rollout starts a process
            for request in self.pending.values():
                if not request.answer.done():
                    request.answer.set_result((MessageKind.RESULT, pickle.dumps(None)))
            return
        self._deaths += 1
        self._pool.deaths["(runner process died)", how] += 1
        report = f"{self._name} {how}, with {len(self.pending)} unfinished episodes"
        if self._deaths > MAX_DEATHS:
            self._fail(WorkerError(f"{report}; it was replaced {MAX_DEATHS} times in this rollout already"))
            return
        logger.warning("%s; they are started again", report)
        try:
            await self._start()
        except OSError as e:
            self._fail(WorkerError(f"{report}; another process could not be started: {e}"))

    def _fail(self, error: Exception) -> None:
        """Raise the error in all requests of this rollout."""
        self._error = error
        for request in self.pending.values():
            if not request.answer.done():
                request.answer.set_exception(error)

    async def _end(self) -> int | None:
        """Close the socket, which ends the process, or kill it. Returns its exit code if it ended without a kill."""
        process, channel = self._process, self._channel
        if process is None:
            return None
        self._channel = None
        self._shut_socket()
        if channel is not None:
            channel.close()
        await asyncio.to_thread(process.join, JOIN_TIMEOUT_S)
        code = process.exitcode
        if code is None:
            process.kill()
            await asyncio.to_thread(process.join)
        self._process = None
        return code


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
