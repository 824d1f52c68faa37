"""SGLang servers on the nodes of a ray cluster. Each server is the child of one actor, and each actor has a bundle of one placement group.

A server that dies is started again by its actor. If its node died, ray moves the bundle to another node once one has room, and the server
starts there, at another address. ray is imported only here and only when it is used.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.core.ports import free_port
from agentrl.core.ray_cluster import CONNECT_S, bundle_of, connect, listed, options_of, release, reserve
from agentrl.engine.sglang.installation import Installation
from agentrl.engine.sglang.launch_spec import LaunchSpec, command_line
from agentrl.engine.sglang.server_process import START_TIMEOUT_S, ServerProcess
from agentrl.errors import ConfigError, EngineFailure

EXIT_POLL_S = 0.2
STOP_S = 90.0
"""limit of stopping a server, its process tree included"""
_NOT_PLACED = "http://not-placed.invalid:1"


class ServerHost:
    """The actor's code: one server's process on this node."""

    def __init__(self, spec: LaunchSpec, installation: Installation, log: Path) -> None:
        self._spec, self._installation, self._log = spec, installation, log
        self._server: ServerProcess | None = None

    async def start(self) -> str:
        """Start the process and return the server's address."""
        import ray

        port, host = free_port(), ray.util.get_node_ip_address()
        command = command_line(self._spec, self._installation, 0, port, host=host)
        self._server = ServerProcess(command, self._installation.environment, self._log, f"http://{host}:{port}")
        self._server.start()
        return self._server.address

    async def wait_ready(self, timeout_s: float) -> None:
        """See `ServerProcess.wait_ready`."""
        assert self._server is not None
        await self._server.wait_ready(timeout_s)

    async def wait_exit(self) -> None:
        """Return when the process has ended."""
        while self._server is not None and self._server.alive:  # noqa: ASYNC110  the end of a process raises no event
            await asyncio.sleep(EXIT_POLL_S)

    async def stop(self) -> None:
        """See `ServerProcess.stop`."""
        if self._server is not None:
            await self._server.stop()


class RayServer:
    """A server on some node, with the methods of `ServerProcess`. `address` changes when it starts."""

    def __init__(self, servers: RayServers, number: int) -> None:
        self._servers, self._number = servers, number
        self.address = _NOT_PLACED
        self._actor: Any = None
        self._started: Any = None
        self._exited: Any = None

    def start(self) -> None:
        """Ask for the actor and its server; `wait_ready` waits for both."""
        self._actor = self._servers.make_actor(self._number)
        self._started = self._actor.start.remote()
        self._exited = None

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as the cluster has reported."""
        import ray

        if self._actor is None:
            return False
        return self._exited is None or not ray.wait([self._exited], timeout=0)[0]

    @property
    def has_room(self) -> bool:
        """Whether the cluster has reserved the server's room, which is asked for if it is a late one."""
        return self._servers.has_room(self._number)

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until a node has room for the server and it answers /health.

        Raises:
            EngineFailure: it died, its node died, or it was not ready in time.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        self.address = await self._result(self._started, timeout_s)
        self._exited = self._actor.wait_exit.remote()
        left_s = max(1.0, deadline - asyncio.get_running_loop().time())
        await self._result(self._actor.wait_ready.remote(left_s), left_s + CONNECT_S)

    async def stop(self) -> None:
        """End the server and its actor. Idempotent.

        Raises:
            EngineFailure: the process does not end although it was killed.
        """
        import ray

        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        try:
            await self._result(actor.stop.remote(), STOP_S)
        except EngineFailure as e:
            if e.cause == "engine: server does not end":
                raise
        finally:
            ray.kill(actor)

    async def _result(self, reference: Any, timeout_s: float) -> Any:
        """The value of a call to the actor; whatever went wrong is an EngineFailure."""
        import ray

        where = f"server {self._number} of the ray cluster ({self.address})"
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
        except TimeoutError:
            raise EngineFailure(
                f"{where} did not answer within {timeout_s:g} s: no node has room for it, or its node does not respond",
                "engine: timeout",
            ) from None
        except ray.exceptions.RayTaskError as e:
            raise (
                e.cause if isinstance(e.cause, EngineFailure) else EngineFailure(f"{where}: {e}", "engine: server died")
            ) from e
        except ray.exceptions.RayError as e:
            raise EngineFailure(f"{where}: its actor or its node died: {str(e)[:300]}", "engine: server died") from e


@dataclass(eq=False, kw_only=True)
class RayServers:
    """The place of a run's servers in a ray cluster."""

    spec: LaunchSpec
    installation: Installation
    logs: Path
    """folder of the logs, on each server's own node"""
    group: Any
    """the placement group of the servers with which a run starts; one bundle for each"""
    first: int
    """the number of these servers"""
    late: dict[int, Any] = field(default_factory=dict)
    """the placement groups of other servers, as far as they were asked for"""

    @classmethod
    def reserve(cls, address: str, spec: LaunchSpec, installation: Installation, logs: Path, first: int) -> RayServers:
        """Connect to the cluster and reserve what the first servers need.

        Args:
            address: As of `--ray-address`.
            spec: The servers.
            installation: SGLang, which each node has at the same path.
            logs: Folder of the logs on each node.
            first: With how many servers the run starts.

        Raises:
            ConfigError: ray is missing, the cluster does not answer, or has too little.
        """
        connect(address)
        group = reserve(bundle_of(spec.gpus_per_engine), first, "SPREAD")
        return cls(spec=replace(spec, first_gpu=0), installation=installation, logs=logs, group=group, first=first)

    def has_room(self, number: int) -> bool:
        """Whether a server's bundle is reserved. That of a late one is asked for at the first call, and again if its node dies."""
        import ray

        if number < self.first:
            return True
        bundle = bundle_of(self.spec.gpus_per_engine)
        if number not in self.late:
            self.late[number] = ray.util.placement_group([bundle])
        return bool(ray.util.placement_group_table(self.late[number])["state"] == "CREATED")

    def make_actor(self, number: int) -> Any:
        """A new actor in bundle `number`; it waits while no node has the bundle."""
        import ray

        group, index = (self.group, number) if number < self.first else (self.late[number], 0)
        options = options_of(group, index, bundle_of(self.spec.gpus_per_engine))
        actor = ray.remote(ServerHost).options(**options)
        return actor.remote(self.spec, self.installation, self.logs / f"engine{number}.log")

    def server(self, number: int) -> RayServer:
        """Server `number`, not started."""
        return RayServer(self, number)

    def release(self) -> None:
        """Give the reserved resources back; idempotent."""
        for group in (self.group, *self.late.values()):
            release(group)


def check_resources(address: str, spec: LaunchSpec | None, *, ranks: int, runners: int) -> None:
    """Refuse servers, trainer ranks and runner processes for which the cluster has too little, however idle it is.

    Raises:
        ConfigError: it has too little, or does not answer.
    """
    connect(address)
    import ray

    bundle = bundle_of(1 if spec is None else spec.gpus_per_engine)
    rank, runner, total = bundle_of(1), bundle_of(0), ray.cluster_resources()
    engines = 0 if spec is None else spec.engines
    kinds = {"engines": engines, "trainer ranks": ranks, "runner processes": runners}
    wanted = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    for name, amount in bundle.items():
        needed = amount * engines + rank[name] * ranks + runner.get(name, 0) * runners
        if total.get(name, 0) < needed:
            raise ConfigError(f"{wanted} need {needed:g} {name}s; the ray cluster at {address} has {listed(total)}")
