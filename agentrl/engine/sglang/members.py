"""A server of a fleet, and commands to several servers at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.ray_servers import RayServer
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.errors import EngineFailure, Failure

logger = logging.getLogger(__name__)

UNHEALTHY_S = 60.0
"""A server that agentrl started and that does not answer is restarted after this time."""
Failures = dict[str, EngineFailure]
"""failures by the engine's address"""


@dataclass(eq=False)
class Member:
    """One server of a fleet."""

    engine: SGLangEngine
    process: ServerProcess | RayServer | None = None
    """None: an external server"""
    state: str = "down"
    """`ready`: up, with the current weights. `stale`: up, with other weights. `down`: anything else."""
    reason: str = "not started"
    """why it is not ready"""
    down_since: float = 0.0
    """the event loop's time"""
    weights_unknown: bool = False
    """a weight update failed: its weights may be a mixture of two versions"""
    restarts: int = 0
    sessions: set[str] = field(default_factory=set)
    late: bool = False
    """it joins when the ray cluster has room for it; nobody waits for it"""

    @property
    def waits_for_room(self) -> bool:
        """Whether its server cannot start, since the ray cluster has no room for it."""
        return self.late and isinstance(self.process, RayServer) and not self.process.has_room

    async def connect(self, timeout_s: float) -> None:
        """Wait until the process is ready, and connect."""
        if self.process is not None:
            await self.process.wait_ready(timeout_s)
            if self.process.address != self.engine.address:
                await self.engine.move(self.process.address)
        await self.engine.start()

    async def revive(self, timeout_s: float, *, may_command: bool) -> None:
        """Wait until the server generates again. A process that died, answers nothing for long or has unknown weights is restarted.

        `may_command`: False if another fleet controls the server, so that its pause must not be ended.
        """
        now = asyncio.get_running_loop().time
        if self.process is not None:
            unresponsive = now() - self.down_since > UNHEALTHY_S
            if self.weights_unknown or unresponsive or not self.process.alive:
                await self.process.stop()
                if self.late and not self.engine.starts:
                    logger.warning("the ray cluster has room for another server, which is started")
                else:
                    self.restarts += 1
                    logger.warning("restarting the server %s (restart %d)", self.engine.address, self.restarts)
                self.process.start()
                self.down_since = now()
                await self.connect(timeout_s)
                self.weights_unknown = False
                return
        await self.engine.start()
        if may_command:
            await self.engine.api.score((1, 1), timeout_s=UNHEALTHY_S)
        else:
            await self.engine.generate((1, 1), SamplingParams(max_new_tokens=1), session="")


async def failures_of(engines: Sequence[SGLangEngine], command: Callable[[SGLangEngine], Awaitable[Any]]) -> Failures:
    """Run `command` on all engines concurrently; returns what failed. Exceptions that are not Failures are raised."""
    results = await asyncio.gather(*(command(e) for e in engines), return_exceptions=True)
    failures: Failures = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, EngineFailure):
            failures[engine.address] = result
        elif isinstance(result, Failure):
            failures[engine.address] = EngineFailure(str(result), result.cause)
        elif isinstance(result, BaseException):
            raise result
    return failures


async def all_or_cancel(work: Iterable[Awaitable[Any]]) -> None:
    """Wait for all; the first exception cancels the others and is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
