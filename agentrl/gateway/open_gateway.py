"""A gateway that stands alone: an agent that somebody else starts opens an episode with its first request, under a key of its choice."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentrl.errors import EnvFailure
from agentrl.gateway.driver import PlaybackDriver, agent_env
from agentrl.gateway.protocol import RequestError
from agentrl.gateway.server import GatewayServer
from agentrl.gateway.session import GatewaySession
from agentrl.rollout.episode import Episode, EpisodeRunner
from agentrl.types import EpisodeSpec, StopReason, Task, Trajectory

_LOOK_AGAIN_S = 0.05
"""least time between two looks at whether an episode has become idle"""


class OpenGateway:
    """Records the episodes of all clients.

    Args:
        runner: plays the episodes; its driver is replaced.
        record: called with each finished episode.
        host: address to listen on.
        port: 0: any free port.
        idle_s: an episode ends when its key has made no request for so long.
        most: episodes at a time.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        record: Callable[[Trajectory], None],
        *,
        host: str,
        port: int,
        idle_s: float,
        most: int,
    ) -> None:
        self.runner = replace(runner, driver=self)
        self.server = GatewayServer(host, port, self._open)
        self._record, self._idle_s, self._most = record, idle_s, most
        self._numbers = itertools.count()
        self._opening: dict[int, tuple[str, asyncio.Future[GatewaySession]]] = {}
        """key and session of each episode that begins, by its ordinal"""
        self._by_key: dict[str, asyncio.Future[GatewaySession]] = {}
        self._episodes: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """raises why an episode could not be recorded, as when the disk is full"""

    async def play(self, episode: Episode) -> StopReason:
        """Serve one episode until its key is idle, or the gateway closes."""
        key, opened = self._opening.pop(episode.spec.index)
        try:
            await episode.instance.create(episode.seed, episode.spec.task)
            env = agent_env(episode)
            session = GatewaySession(episode, env)
            self.server.register(session, key)
            opened.set_result(session)
        finally:
            if not opened.done():
                opened.set_exception(EnvFailure("the episode could not begin"))
        episode.activity = "the agent's run"
        try:
            await self._until_idle(session)
        finally:
            self._by_key.pop(key, None)
            self.server.forget(key)
            await session.seal()
            episode.turns = [d.complete() for d in session.recorder.drafts]
            env.gateway = session.summary()
        if session.failed.done():
            session.failed.result()
        return session.recorder.bound or StopReason.TERMINATED

    def playback(self, recorded: Trajectory) -> PlaybackDriver:
        """See `GatewayDriver.playback`."""
        return PlaybackDriver(recorded)

    async def close(self) -> None:
        """End and record all episodes, then stop the server."""
        self._closing.set()
        if self._episodes:
            await asyncio.wait(self._episodes)
        await self.server.close()

    async def _open(self, key: str) -> GatewaySession:
        """The session of an unknown key."""
        opened = self._by_key.get(key)
        if opened is None:
            if len(self._by_key) >= self._most:
                raise RequestError(
                    429, f"{self._most} episodes are open (--concurrency); try again later", "too_many_episodes"
                )
            opened = self._by_key[key] = asyncio.get_running_loop().create_future()
            number = next(self._numbers)
            self._opening[number] = key, opened
            task = asyncio.ensure_future(self._play(EpisodeSpec(Task(f"agent-{number}", ""), number, number)))
            self._episodes.add(task)
            task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(opened)
        except EnvFailure as e:
            self._by_key.pop(key, None)
            raise RequestError(503, str(e), "server_error") from e

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._episodes.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # it may be that nobody waits for it

    async def _play(self, spec: EpisodeSpec) -> None:
        self._record(await self.runner.run(spec))

    async def _until_idle(self, session: GatewaySession) -> None:
        """Wait until no request was made for `idle_s`, the episode fails or spends its turns, or the gateway closes."""
        closing: asyncio.Future[Any] = asyncio.ensure_future(self._closing.wait())
        over: set[asyncio.Future[Any]] = {closing, session.failed}
        try:
            while not (closing.done() or session.failed.done() or session.spent.is_set()):
                rest = self._idle_s - (time.monotonic() - session.last_request)
                if rest <= 0 and not session.busy:
                    return
                waited = max(rest, _LOOK_AGAIN_S)
                await asyncio.wait(over, timeout=waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
