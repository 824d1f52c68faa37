"""One HTTP server as an engine's client sees it: JSON in, JSON out, and every fault an EngineFailure with a short cause.

Retried is one thing only: a kept-alive connection that turns out closed as soon as it is used, before any byte of the answer came (SGLang
closes idle ones after some seconds). It is asked once more on a fresh connection. A 4xx is never retried, a 5xx and a lost connection are failures.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from agentrl.engine.sglang.connection import Answer, Connection, Lost, Origin
from agentrl.errors import EngineFailure

KEEP_ALIVE_S = 4.0
"""idle connections are dropped by us before the server does it"""
CONNECT_S = 10.0
CLOSED_BEFORE_S = 1.0
"""a connection lost so soon after a request was closed before it came; later the server may have begun to work on it"""
_QUOTED = 400
"""characters of an error page that are quoted"""


class HttpClient:
    """JSON over HTTP/1.1 to one address. Made and used on one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._origin = Origin(self.address)
        self._idle: list[Connection] = []
        """the one used last at the end"""
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(self, path: str, body: Any, *, timeout_s: float) -> Any:
        """Send `body` as JSON; returns the parsed answer (text where it is no JSON).

        Raises:
            EngineFailure: no answer in time, a lost connection, or a status from 400 up.
        """
        request = self._origin.request("POST", path, orjson.dumps(body))
        return await self._ask(path, request, timeout_s)

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """As `post`, without a body."""
        return await self._ask(path, self._origin.request("GET", path, None), timeout_s)

    async def close(self) -> None:
        """Drop all connections; idempotent."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def _ask(self, path: str, request: bytes, timeout_s: float) -> Any:
        kept, clock = self._kept(), asyncio.get_running_loop().time
        begun = clock()
        try:
            try:
                answer = await self._once(kept or await self._connect(timeout_s), request, timeout_s)
            except Lost as e:
                if kept is None or e.begun or self._closed or clock() - begun > CLOSED_BEFORE_S:
                    raise
                answer = await self._once(await self._connect(timeout_s), request, timeout_s)
        except TimeoutError as e:
            raise EngineFailure(f"{self.address}{path} did not answer within {timeout_s:g} s", "engine: timeout") from e
        except Lost as e:
            raise EngineFailure(f"{self.address}{path}: the connection was lost: {e}", "engine: connection lost") from e
        if answer.status >= 300:
            raise self._refused(path, answer)
        try:
            return orjson.loads(answer.content)
        except orjson.JSONDecodeError:
            return answer.content.decode("utf-8", "replace")

    async def _once(self, connection: Connection, request: bytes, timeout_s: float) -> Answer:
        self._busy.add(connection)
        answered = False
        try:
            answer = await connection.ask(request, timeout_s)
            answered = True
        finally:  # also after a cancel that came with the answer
            self._busy.discard(connection)
            if answered and connection.usable and not self._closed:
                self._keep(connection)
            else:
                connection.close()
        return answer

    async def _connect(self, timeout_s: float) -> Connection:
        try:
            async with asyncio.timeout(min(CONNECT_S, timeout_s)):
                return await self._origin.connect()
        except OSError as e:  # a TimeoutError too
            what = str(e) or f"no connection within {min(CONNECT_S, timeout_s):g} s"
            raise EngineFailure(f"{self.address} cannot be reached: {what}", "engine: unreachable") from e

    def _keep(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._drop_idle)

    def _kept(self) -> Connection | None:
        """An open connection, the one used last."""
        while self._idle:
            connection = self._idle.pop()
            fresh = asyncio.get_running_loop().time() - connection.idle_since < KEEP_ALIVE_S
            if fresh and connection.usable:
                return connection
            connection.close()
        return None

    def _drop_idle(self) -> None:
        """Close what was idle for long, and look again later while there are others."""
        loop = asyncio.get_running_loop()
        old = loop.time() - KEEP_ALIVE_S
        for connection in self._idle:
            if connection.idle_since <= old:
                connection.close()
        self._idle = [c for c in self._idle if c.idle_since > old]
        self._sweep = loop.call_at(self._idle[0].idle_since + KEEP_ALIVE_S, self._drop_idle) if self._idle else None

    def _refused(self, path: str, answer: Answer) -> EngineFailure:
        said = " ".join(answer.content.decode("utf-8", "replace").split())[:_QUOTED]
        return EngineFailure(f"{self.address}{path} answered {answer.status}: {said}", f"engine: HTTP {answer.status}")
