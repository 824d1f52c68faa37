"""One runner process of several (rollout/process_pool.py): plays the episodes it is told of, on one event loop, until the controller hangs up."""

from __future__ import annotations

import asyncio
import copyreg
import io
import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import fields, replace
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any, Self

from agentrl.core.child_process import exit_with_parent
from agentrl.engine.base import Engine
from agentrl.errors import AgentRLError, ContractError, UsageError, WorkerError
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.rollout import fewer_collections
from agentrl.types import (
    Action,
    Observation,
    ParseError,
    Segment,
    Span,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

BEAT_S = 5.0
"""between signs of life"""
ORPHAN_GRACE_S = 120.0
"""for closing what runs, after the controller is gone"""
_HEAD = struct.Struct("!BQQ")
_SAME = Task("", "")
"""in the place of a task that the controller has"""

Tell = Callable[[Any], None]
Make = Callable[[], Callable[[Any, Tell], tuple[EpisodeRunner, Engine]]]
"""Called once in each process. What it returns makes the runner of one rollout, and its engine, from the rollout's settings.
The worker starts and closes the engine. Must be picklable."""


class Kind(IntEnum):
    """Of a message."""

    OPEN = 0
    """a rollout begins, with these settings; answered when its runner is ready"""
    RUN = 1
    """play this episode"""
    CANCEL = 2
    """give that question up; no answer"""
    CLOSE = 3
    """the rollout is over: end what runs, let go of the engines"""
    DONE = 4
    """the answer to a question"""
    RAISED = 5
    """the error instead"""
    TOLD = 6
    """no answer: word of the runner's own, or None as a sign of life"""


class Channel:
    """Messages over one end of a socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.drain = writer.drain
        self.close = writer.close

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        """On this socket."""
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))

    def send(self, kind: Kind, number: int, payload: bytes) -> None:
        """Into the buffer; await `drain` where more could pile up."""
        self._writer.write(_HEAD.pack(kind, number, len(payload)) + payload)

    async def receive(self) -> tuple[Kind, int, bytes]:
        """The next message.

        Raises:
            EOFError, OSError: the other side is gone.
        """
        kind, number, length = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
        return Kind(kind), number, await self._reader.readexactly(length)


def serve(make: Make, sock: socket.socket, controller: int) -> None:
    """Run the process, a child of `controller`."""
    exit_with_parent(
        controller, ORPHAN_GRACE_S
    )  # the end of the stream suffices, unless user code blocks the event loop
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the controller, which then hangs up
    with fewer_collections:
        asyncio.run(_serve(make, sock))


async def _serve(make: Make, sock: socket.socket) -> None:
    process = _Process(await Channel.over(sock), make)
    beat = asyncio.create_task(process.beat())
    try:
        await process.listen()
    except (EOFError, OSError):
        return  # the controller is gone
    finally:
        beat.cancel()
        await process.close()


class _Process:
    """What runs in it."""

    def __init__(self, channel: Channel, make: Make) -> None:
        self.channel = channel
        self.make = make()
        self.runner: EpisodeRunner | None = None
        self.engine: Engine | None = None
        self.running: dict[int, asyncio.Task[None]] = {}

    async def beat(self) -> None:
        """Say now and then that the event loop turns."""
        while True:
            self.tell(None)
            await asyncio.sleep(BEAT_S)

    def tell(self, word: Any) -> None:
        self.channel.send(Kind.TOLD, 0, pickle.dumps(word))

    async def listen(self) -> None:
        """Do what the controller says; ends with its end of file."""
        while True:
            kind, number, payload = await self.channel.receive()
            if kind is Kind.RUN:
                self.running[number] = asyncio.create_task(self.answer(number, self.run(payload)))
                self.running[number].add_done_callback(partial(self._forget, number))
            elif kind is Kind.CANCEL:
                if number in self.running:
                    self.running[number].cancel()
            else:
                await self.answer(number, self.open(payload) if kind is Kind.OPEN else self.close())

    def _forget(self, number: int, _: object) -> None:
        del self.running[number]

    async def answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        """Do it and send what comes of it."""
        try:
            kind, payload = Kind.DONE, _pickled(await work)
        except Exception as e:  # noqa: BLE001  handed to the controller, where it is raised
            kind, payload = Kind.RAISED, _portable(e)
        self.channel.send(kind, number, payload)
        with suppress(OSError):  # the controller is gone, as `listen` will see
            await self.channel.drain()

    async def open(self, payload: bytes) -> None:
        """Make the rollout's runner."""
        self.runner, self.engine = self.make(pickle.loads(payload), self.tell)
        await self.engine.start()

    async def run(self, payload: bytes) -> Trajectory:
        """Play an episode."""
        assert self.runner is not None, "RUN comes after OPEN"
        return replace(await self.runner.run(pickle.loads(payload)), task=_SAME)

    async def close(self) -> None:
        """End what runs, let go of the engines."""
        runner, engine = self.runner, self.engine
        self.runner = self.engine = None
        for task in self.running.values():
            task.cancel()
        if self.running:
            await asyncio.wait(list(self.running.values()))
        if engine is not None:
            await engine.close()
        if runner is not None:
            runner.close()


def _as_call(cls: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    names = [f.name for f in fields(cls)]
    values = attrgetter(*names)
    return (lambda obj: (cls, (values(obj),))) if len(names) == 1 else (lambda obj: (cls, values(obj)))


_WORDS: dict[type, Callable[[Any], Any]] = {
    cls: _as_call(cls)
    for cls in (Trajectory, Segment, Span, Turn, Action, Observation, ToolCall, ToolResult, ParseError)
}
"""pickled as calls of their classes, which takes half as long as dataclasses' own way"""


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _WORDS
    try:
        pickler.dump(value)
        return buffer.getvalue()
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise ContractError(
            f"with several runner processes an episode's state, info and results must be picklable: {e}; "
            "return plain values, or give --runner-processes 1"
        ) from e


def _portable(error: BaseException) -> bytes:
    """An error, pickled: as it is if it is one of ours and comes back as such, else as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, AgentRLError):
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
        except Exception:  # noqa: BLE001  user code again: a class of its own, with what it holds
            pass
        ours = UsageError if isinstance(error, UsageError) else WorkerError
        return pickle.dumps(ours(f"{type(error).__name__}: {error}"))
    return pickle.dumps(WorkerError("".join(traceback.format_exception(error))))
