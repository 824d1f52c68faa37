"""The controller's side of user processes: it starts the process that forks them, calls them, and ends them.

A call that is cancelled, for example because its time limit expired, is cancelled in the process too. A process that ends fails its calls.
Closing a process kills it together with everything that it started, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from agentrl.core.child_process import how_it_ended
from agentrl.core.message_channel import Channel, MessageKind
from agentrl.core.registry import USER_MODULE
from agentrl.errors import ContractError, InfraError
from agentrl.rollout.isolation.fork_server_process import FORK, KILL, READY, TOKEN_BYTES, Modules, serve_forks
from agentrl.rollout.isolation.user_process import Host, Raised

START_TIMEOUT_S = 120.0
"""Time limit for the imports of the fork server."""
COMMAND_TIMEOUT_S = 30.0
"""A fork server that does not read a command for this time counts as failed."""
END_TIMEOUT_S = 5.0
"""Time within which the end of a killed process is reported."""
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads


class UserProcessError(RuntimeError):
    """A user process ended during a call. It is not a failure of infrastructure: what the policy sent may have caused it."""


class UserProcess:
    """One user process."""

    def __init__(self, server: ForkServer, token: int, channel: Channel) -> None:
        self.how_it_ended: str | None = None
        """None: it runs"""
        self.exit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """done when it has ended"""
        self.interrupted = False
        """a call was cancelled and may still run"""
        self._server, self._token, self._channel = server, token, channel
        self._calls = 0
        self._pending: dict[int, asyncio.Future[tuple[MessageKind, bytes]]] = {}
        self._listener = asyncio.create_task(self._listen())

    async def call(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call one of the operations of the process's host.

        Raises:
            UserProcessError: the process ended.
            ContractError: an argument cannot be pickled.
            Exception: what the operation raised, or an `IsolatedError` that describes it.
        """
        try:
            payload = pickle.dumps((operation, args, kwargs))
        except (pickle.PicklingError, TypeError, AttributeError) as e:
            raise ContractError(f"an argument of {operation} cannot be sent to the environment's process: {e}") from e
        return await self.request(MessageKind.RUN, payload)

    async def request(self, kind: MessageKind, payload: bytes) -> Any:
        """Send a message and return the value of its answer; see `call`."""
        if self.how_it_ended is not None:
            raise UserProcessError(f"the process of user code {self.how_it_ended}")
        self._calls += 1
        number = self._calls
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(kind, number, payload)
            kind, data = await answer
        except asyncio.CancelledError:
            self.interrupted = True
            with suppress(OSError):
                self._channel.send(MessageKind.CANCEL, number, b"")
            raise
        finally:
            del self._pending[number]
        value = pickle.loads(data)
        if kind is MessageKind.ERROR:
            raise value.exception() if isinstance(value, Raised) else value
        return value

    async def close(self) -> None:
        """Kill the process and what it started. Returns when it has ended."""
        if self.how_it_ended is None:
            self._server.command(KILL, self._token)
            await asyncio.wait({self.exit}, timeout=END_TIMEOUT_S)
        self._listener.cancel()
        self._channel.close()

    def end(self, how: str) -> None:
        """Note that the process has ended, and fail its calls."""
        self.how_it_ended = self.how_it_ended or how
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(UserProcessError(f"the process of user code {how}"))
        if not self.exit.done():
            self.exit.set_result(None)

    async def _listen(self) -> None:
        try:
            while True:
                kind, number, payload = await self._channel.receive()
                answer = self._pending.get(number)
                if answer is not None and not answer.done():
                    answer.set_result((kind, payload))
        except (EOFError, OSError, ValueError):  # ValueError: user code wrote into the socket
            self._server.command(KILL, self._token)  # it closed the socket, or has ended; its end is reported


class ForkServer:
    """Starts user processes. Its own process starts when the first one is needed.

    Args:
        modules: the modules that it imports before it forks, so that user processes need not.
    """

    def __init__(self, modules: Modules = ()) -> None:
        self.modules = tuple(modules)
        self._commands: socket.socket | None = None
        self._shut: Callable[[], Any] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: asyncio.Task[None] | None = None
        self._events: asyncio.StreamWriter | None = None
        self._starting = asyncio.Lock()
        self._ready: asyncio.Future[None] | None = None
        self._processes: dict[int, UserProcess] = {}
        self._tokens = 0

    async def open(self, make_host: Callable[[], Host], what: str, modules: Modules = ()) -> UserProcess:
        """Fork a process and create its host in it.

        Args:
            make_host: picklable; called in the process.
            what: what runs in it, for error messages.
            modules: further modules that it imports.

        Raises:
            ContractError: `make_host` cannot be sent to a process.
            InfraError: the machine cannot start a process.
            Exception: what `make_host` raised.
        """
        try:
            payload = pickle.dumps(((*self.modules, *modules), pickle.dumps(make_host)))
        except (pickle.PicklingError, TypeError, AttributeError) as e:
            raise ContractError(
                f"{what} cannot run in a process of its own: {e}; define it at the top level of a module or file, "
                "and give it picklable arguments"
            ) from e
        process = await self._fork()
        try:
            await process.request(MessageKind.OPEN, payload)
        except UserProcessError as e:
            raise InfraError(f"{what}: {e}, while it started") from e
        except BaseException:
            await process.close()
            raise
        return process

    def command(self, command: bytes, token: int, descriptor: int | None = None) -> None:
        """Send a command. A server that is gone has reported its processes as ended.

        Raises:
            TimeoutError: the server does not read.
        """
        message = command + token.to_bytes(TOKEN_BYTES, "big")
        if self._commands is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._commands, [message], [] if descriptor is None else [descriptor])

    def close(self) -> None:
        """End the server and all its processes, and wait for it; a further `open` starts another one."""
        self._shut()
        self._commands = None
        for process in self._processes.values():
            process.end("was killed when the run ended")
        self._processes.clear()

    async def start(self) -> None:
        """Start the server's process, unless it runs.

        Raises:
            InfraError: it cannot be started.
        """
        async with self._starting:
            if self._commands is None or self._loop is not asyncio.get_running_loop():
                await self._start()

    async def _fork(self) -> UserProcess:
        await self.start()
        ours, theirs = socket.socketpair()
        self._tokens += 1
        token = self._tokens
        with theirs:
            process = self._processes[token] = UserProcess(self, token, await Channel.over(ours))
            try:
                self.command(FORK, token, theirs.fileno())
            except OSError as e:
                raise InfraError(f"the process that starts user processes does not answer: {e}") from e
        return process

    async def _start(self) -> None:
        self.close()
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        events, their_events = socket.socketpair()
        with theirs, their_events:
            arguments = (theirs, their_events, os.getpid(), self.modules)
            process = _SPAWN.Process(target=serve_forks, args=arguments, name="fork server")
            # also when this object is forgotten, and at exit, where multiprocessing waits for its processes
            self._shut = Finalize(self, _shut, (process, ours, events), exitpriority=1)
            try:
                await asyncio.to_thread(process.start)
            except OSError as e:
                raise InfraError(f"cannot start a process for user code: {e}") from e
        ours.settimeout(COMMAND_TIMEOUT_S)
        self._commands = ours
        reader, self._events = await asyncio.open_connection(
            sock=events
        )  # a writer that is forgotten closes the socket
        self._ready = self._loop.create_future()
        self._listener = asyncio.create_task(self._listen(reader, ours))
        await asyncio.wait({self._ready}, timeout=START_TIMEOUT_S)
        if not self._ready.done() or self._commands is None:
            self.close()
            raise InfraError("the process that starts processes for user code did not start; see its output above")

    async def _listen(self, reader: asyncio.StreamReader, commands: socket.socket) -> None:
        """Note the ends of processes, until the server is gone."""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "big")
                token, code, error = pickle.loads(await reader.readexactly(length))
                if token == READY and self._ready is not None:
                    self._ready.set_result(None)
                process = self._processes.pop(token, None)
                if process is not None:
                    process.end(how_it_ended(code) if code is not None else f"could not be started: {error}")
        except (EOFError, OSError):
            if self._commands is commands:
                self._commands = None
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
                for process in self._processes.values():
                    process.end("ended with the process that started it")
                self._processes.clear()


def _shut(process: BaseProcess, *sockets: socket.socket) -> None:
    """End the server by closing its sockets, and wait for it: it kills its processes first, and would stay a zombie otherwise."""
    for sock in sockets:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    if process.pid is not None:
        process.join(END_TIMEOUT_S)


def modules_of(*objects: Any) -> Modules:
    """The modules that define these classes and functions, each with its file if it was loaded by path."""
    names = dict.fromkeys(o.__module__ for o in objects if isinstance(getattr(o, "__module__", None), str))
    return [
        (name, getattr(sys.modules.get(name), "__file__", None) if name.startswith(USER_MODULE) else None)
        for name in names
        if name != "__main__"
    ]
