"""Runner processes on the nodes of a ray cluster: each is an actor in a separate bundle, which dials the controller.

The bundles are one placement group, spread over the nodes. If a node dies, ray moves its bundles to nodes with room, and the pool starts the
actors there again (rollout/process_pool.py). ray is imported only when it is used.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from agentrl.core.ray_cluster import bundle_of, connect, options_of, release, reserve
from agentrl.core.secret_socket import Controller, Listener, dial, differing_version, versions
from agentrl.errors import WorkerError
from agentrl.rollout.process_pool import JOIN_TIMEOUT_S, START_TIMEOUT_S
from agentrl.rollout.process_worker import RunnerFactory, play


class Hello(NamedTuple):
    """First message of a process."""

    key: int
    versions: dict[str, str]


class RunnerActor:
    """The actor's code: it is the runner process."""

    def serve(
        self, controller: Controller, key: int, folder: str, modules: Sequence[str], factory: RunnerFactory
    ) -> None:
        """Play episodes until the controller closes the connection, or is gone.

        Args:
            controller: where it listens.
            key: of this process.
            folder: the controller's current folder, to which relative paths refer.
            modules: where the controller finds modules.
            factory: as of `ProcessPool`.
        """
        os.chdir(folder)
        sys.path += [path for path in modules if path not in sys.path]
        with dial(*controller) as connection:
            connection.send(Hello(key, versions()))
            sock = _socket_of(connection)
        play(factory, sock)


class RayProcesses:
    """Room for the processes of a pool in a ray cluster.

    Args:
        address: As of `--ray-address`.
        number: of processes.
    """

    def __init__(self, address: str, number: int) -> None:
        """Connect to the cluster and reserve the room.

        Raises:
            ConfigError: the cluster does not answer, or has too little.
        """
        connect(address)
        import ray

        self._group = reserve(bundle_of(0), number, "SPREAD")
        self._keys = count()
        self._expected: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[socket.socket]]] = {}
        self._listener = Listener(str(ray.util.get_node_ip_address()), 0, self._admit)

    def _admit(self, hello: Hello, connection: Connection, peer: str) -> None:
        """Hand a connection to the process that waits for it."""
        loop, connected = self._expected.pop(hello.key, (None, None))
        if loop is None or connected is None:
            connection.close()
            return
        differs = differing_version(hello.versions)
        result = _socket_of(connection) if differs is None else WorkerError(f"node {peer} {differs}")
        connection.close()
        try:
            loop.call_soon_threadsafe(_hand_over, connected, result)
        except RuntimeError:  # the loop is closed: nothing waits any more
            _hand_over(None, result)

    def start(self, factory: RunnerFactory, number: int) -> RayProcess:
        """Start the actor in bundle `number`; it waits while no node has the bundle."""
        import ray

        key = next(self._keys)
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[socket.socket] = loop.create_future()
        self._expected[key] = loop, connected
        actor = ray.remote(RunnerActor).options(**options_of(self._group, number, bundle_of(0))).remote()
        served = actor.serve.remote(self._listener.controller, key, os.getcwd(), sys.path, factory)
        return RayProcess(actor, served, connected)

    def release(self) -> None:
        """Give the room back; idempotent."""
        self._listener.close()
        release(self._group)


class RayProcess:
    """A `RunnerProcess` that is an actor."""

    def __init__(self, actor: Any, served: Any, connected: asyncio.Future[socket.socket]) -> None:
        self._actor, self._connected = actor, connected
        self._served = asyncio.wrap_future(served.future())

    async def connect(self) -> socket.socket:
        """See `RunnerProcess.connect`."""
        waits: list[asyncio.Future[Any]] = [self._connected, self._served]
        await asyncio.wait(waits, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._connected.done():
            raise ConnectionError("the actor has ended, or has not connected in time")
        return self._connected.result()

    def kill(self) -> None:
        """See `RunnerProcess.kill`."""
        import ray

        ray.kill(self._actor)

    async def end(self) -> str:
        """See `RunnerProcess.end`."""
        import ray

        connected = self._connected.done()
        self._connected.cancel()
        await asyncio.wait([self._served], timeout=JOIN_TIMEOUT_S if connected else 0)
        ended = self._served.done()
        if ray.is_initialized():
            ray.kill(self._actor)
        if not ended:
            self._served.cancel()
            return (
                "closed its connection"
                if connected
                else f"did not connect within {START_TIMEOUT_S:g} s: no node has room"
            )
        error = self._served.exception()
        return f"ended: {str(error).strip().splitlines()[-1][:300]}" if error else "closed its connection"


def _socket_of(connection: Connection) -> socket.socket:
    """The socket of a connection, which may be closed then."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _hand_over(connected: asyncio.Future[socket.socket] | None, result: socket.socket | WorkerError) -> None:
    """Give what came to the process that waits for it; None: none waits any more."""
    if isinstance(result, WorkerError):
        if connected is not None and not connected.done():
            connected.set_exception(result)
    elif connected is None or connected.done():
        result.close()
    else:
        connected.set_result(result)
