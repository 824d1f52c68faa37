"""The child side of rollout/process_pool.py: one process that plays episodes on one event loop until the controller closes the socket."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.core.child_process import exit_with_parent
from agentrl.core.message_channel import Channel, MessageKind
from agentrl.engine.sglang.fleet import Fleet
from agentrl.errors import AgentRLError, UsageError, WorkerError
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.rollout.pickling import picklable
from agentrl.rollout.rollout import infrequent_gc
from agentrl.types import Task, Trajectory

HEARTBEAT_S = 5.0
"""Time between two heartbeats."""
ORPHAN_GRACE_S = 120.0
"""Time for closing episodes after the controller is gone. Then the process ends, even if user code blocks its event loop."""
_NO_TASK = Task("", "")
"""replaces the task in a trajectory; the controller has it"""

Notify = Callable[[Any], None]
RunnerFactory = Callable[[], Callable[[Any, Sequence[str], Notify], tuple[EpisodeRunner | MixedRunner, Fleet]]]
"""Called once in each process. It returns a function that creates the runner of one rollout, and the fleet that is attached to the controller's
servers, from the rollout's settings, the servers' addresses, and a callback that sends a notice to the controller. The worker starts and closes
the fleet. Factory and settings must be picklable."""


def serve(factory: RunnerFactory, sock: socket.socket, controller: int) -> None:
    """Run the process, a child of the process `controller`."""
    exit_with_parent(controller, ORPHAN_GRACE_S)
    signal.signal(signal.SIGINT, lambda *_: None)  # the controller handles Ctrl-C and then closes the socket
    # as in the controller: this process was spawned, but what user code starts is not, and semaphores have no name that a kill would leave
    multiprocessing.set_start_method(None, force=True)
    play(factory, sock)


def play(factory: RunnerFactory, sock: socket.socket) -> None:
    """Play episodes until the controller closes the socket."""
    with infrequent_gc:
        asyncio.run(_serve(factory, sock))


async def _serve(factory: RunnerFactory, sock: socket.socket) -> None:
    worker = ProcessWorker(await Channel.over(sock), factory)
    heartbeat = asyncio.create_task(worker.send_heartbeats())
    try:
        await worker.listen()
    except (EOFError, OSError):
        return  # the controller is gone
    finally:
        heartbeat.cancel()
        await worker.close()


class ProcessWorker:
    """Answers the controller's requests."""

    def __init__(self, channel: Channel, factory: RunnerFactory) -> None:
        self.channel = channel
        self.make_runner = factory()
        self.runner: EpisodeRunner | MixedRunner | None = None
        self.fleet: Fleet | None = None
        self.running: dict[int, asyncio.Task[None]] = {}
        """episodes by request number"""

    async def send_heartbeats(self) -> None:
        while True:
            self.notify(None)
            await asyncio.sleep(HEARTBEAT_S)

    def notify(self, notice: Any) -> None:
        self.channel.send(MessageKind.NOTICE, 0, pickle.dumps(notice))

    async def listen(self) -> None:
        """Handle requests until the controller closes the socket, which raises EOFError or OSError."""
        while True:
            kind, number, payload = await self.channel.receive()
            if kind is MessageKind.RUN:
                task = self.running[number] = asyncio.create_task(self.answer(number, self.run(payload)))
                task.add_done_callback(partial(self.running.pop, number))
            elif kind is MessageKind.CANCEL:
                if number in self.running:
                    self.running[number].cancel()
            elif kind is MessageKind.SERVERS:
                if self.fleet is not None:
                    await self.fleet.follow(pickle.loads(payload))
            else:
                await self.answer(number, self.open(payload) if kind is MessageKind.OPEN else self.close())

    async def answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        """Do the work and send its result or its exception."""
        try:
            kind, payload = MessageKind.RESULT, picklable(await work)
        except Exception as e:  # noqa: BLE001  raised in the controller
            kind, payload = MessageKind.ERROR, _pickled_error(e)
        self.channel.send(kind, number, payload)
        with suppress(OSError):  # the controller is gone, as `listen` will notice
            await self.channel.drain()

    async def open(self, payload: bytes) -> None:
        """Create the rollout's runner and attach to its servers."""
        settings, servers = pickle.loads(payload)
        self.runner, self.fleet = self.make_runner(settings, servers, self.notify)
        await self.fleet.start()

    async def run(self, payload: bytes) -> Trajectory:
        """Play an episode."""
        assert self.runner is not None, "RUN comes after OPEN"
        return replace(await self.runner.run(pickle.loads(payload)), task=_NO_TASK)

    async def close(self) -> None:
        """Cancel all episodes, then close the fleet and the runner."""
        runner, fleet = self.runner, self.fleet
        self.runner = self.fleet = None
        for task in self.running.values():
            task.cancel()
        if self.running:
            await asyncio.wait(list(self.running.values()))
        if fleet is not None:
            await fleet.close()
        if runner is not None:
            runner.close()


def _pickled_error(error: BaseException) -> bytes:
    """An error, pickled: unchanged if it is an AgentRLError that can be unpickled, else its text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, AgentRLError):
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
        except Exception:  # noqa: BLE001  user code: a class derived from ours
            pass
        kind = UsageError if isinstance(error, UsageError) else WorkerError
        return pickle.dumps(kind(f"{type(error).__name__}: {error}"))
    return pickle.dumps(WorkerError("".join(traceback.format_exception(error))))
