"""The process in which user code runs: an environment, a `Tool` or a function. It serves one controller until its socket is closed."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agentrl.core.infra_errors import is_infra_error
from agentrl.core.message_channel import Channel, MessageKind
from agentrl.core.timeout_pool import TimeoutPool
from agentrl.errors import AgentRLError, UsageError, describe, place_of
from agentrl.rollout.pickling import picklable

THREADS = 64
"""sync calls at a time in one process; only calls that hang occupy more than a few"""


class Host(Protocol):
    """Holds the user's object in the process."""

    def prepare(self, operation: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """The call, sync or async, that a request asks for."""
        ...


@dataclass(frozen=True)
class Raised:
    """An exception of user code, described: its own class may not be known, or picklable, in the controller."""

    name: str
    message: str | None
    """None: its __str__ raised"""
    infra: bool
    """a failure of infrastructure"""
    timeout: bool
    """a TimeoutError"""
    place: tuple[str, int]
    """file and line"""

    def exception(self) -> Exception:
        """An exception that reads like the original and is classified like it."""
        base = (IsolatedError, TimeoutError) if self.timeout else (IsolatedError,)
        error: Exception = type(self.name, base, {"is_infra_error": self.infra, "raised_at": self.place})(self.message)
        return error


class IsolatedError(Exception):
    """Base class of exceptions that user code raised in its process."""

    is_infra_error = False
    raised_at: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        if self.args[0] is None:
            raise ValueError("the original's __str__ raised")
        return str(self.args[0])


def serve_user_code(sock: socket.socket) -> None:
    """Run the process."""
    gc.enable()
    asyncio.run(_serve(sock))
    os._exit(0)  # without joining threads of user code


async def _serve(sock: socket.socket) -> None:
    channel = await Channel.over(sock)
    pool = TimeoutPool("user code", threads=THREADS, max_abandoned=THREADS)
    host: Host | None = None
    running: dict[int, asyncio.Task[None]] = {}
    while True:
        try:
            kind, number, payload = await channel.receive()
        except (EOFError, OSError):
            return  # the controller is gone, or has closed this process
        if kind is MessageKind.CANCEL:
            if number in running:
                running[number].cancel()
            continue
        if kind is MessageKind.OPEN:
            try:
                host = _make_host(payload)
                _send(channel, MessageKind.RESULT, number, pickle.dumps(None))
            except BaseException as e:  # noqa: BLE001  user code: the import of its module, its __setstate__
                _send(channel, MessageKind.ERROR, number, _error(e))
            continue
        assert host is not None, "OPEN comes first"
        task = running[number] = asyncio.create_task(_answer(channel, pool, host, number, payload))
        task.add_done_callback(partial(_forget, running, number))


def _make_host(payload: bytes) -> Host:
    from agentrl.rollout.isolation.fork_server_process import load_modules

    modules, pickled = pickle.loads(payload)
    load_modules(modules)
    make: Callable[[], Host] = pickle.loads(pickled)
    return make()


async def _answer(channel: Channel, pool: TimeoutPool, host: Host, number: int, payload: bytes) -> None:
    try:
        operation, args, kwargs = pickle.loads(payload)
        value = await pool.call(host.prepare(operation, *args, **kwargs))
        kind, answer = MessageKind.RESULT, picklable(value)
    except Exception as e:  # noqa: BLE001  raised in the controller
        kind, answer = MessageKind.ERROR, _error(e)
    _send(channel, kind, number, answer)


def _send(channel: Channel, kind: MessageKind, number: int, payload: bytes) -> None:
    with suppress(OSError):  # the controller is gone, as `_serve` will notice
        channel.send(kind, number, payload)


def _forget(running: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    running.pop(number, None)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


def _error(error: BaseException) -> bytes:
    """An error for the controller: errors of agentrl as they are, what user code raised as `Raised`."""
    if isinstance(error, AgentRLError) and type(error).__module__ == AgentRLError.__module__:
        with suppress(pickle.PicklingError, TypeError, AttributeError):
            return pickle.dumps(error)
    if isinstance(error, UsageError):
        return pickle.dumps(UsageError(describe(error)))
    _, _, message = describe(error).partition(": ")
    raised = Raised(
        type(error).__name__,
        message if _has_text(error) else None,
        is_infra_error(error),
        isinstance(error, TimeoutError),
        place_of(error),
    )
    return pickle.dumps(raised)


def _has_text(error: BaseException) -> bool:
    return describe(error) != type(error).__name__
