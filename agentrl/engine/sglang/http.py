"""JSON over HTTP to one server, with a pool of kept-alive connections. Every fault is an EngineFailure with a short cause.

Only one kind of fault is retried: a kept-alive connection that the server closed while it was idle (SGLang does so after some seconds). The
request is then sent once more over a new connection, provided that no byte of a response arrived. Statuses from 300 up and connections lost
later are failures.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from agentrl.engine.sglang.connection import Connection, ConnectionLost, Origin, Response
from agentrl.errors import EngineFailure

KEEP_ALIVE_S = 4.0
"""Idle connections are closed after this time, before the server closes them."""
CONNECT_S = 10.0
STALE_WITHIN_S = 1.0
"""A kept-alive connection lost this soon after a request was stale; if it is lost later, the server may have started to process the request."""
_QUOTED_CHARACTERS = 400
"""characters of an error response that are quoted"""


class HttpClient:
    """A client of one server, used on one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._origin = Origin(self.address)
        self._idle: list[Connection] = []
        """least recently used first"""
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(self, path: str, body: Any, *, timeout_s: float) -> Any:
        """Send `body` as JSON; returns the parsed response, or its text if it is not JSON.

        Raises:
            EngineFailure: no response in time, a lost connection, or a status from 300 up.
        """
        return await self._request(path, self._origin.request("POST", path, orjson.dumps(body)), timeout_s)

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """Same as `post` without a body."""
        return await self._request(path, self._origin.request("GET", path, None), timeout_s)

    async def close(self) -> None:
        """Close all connections; idempotent."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def _request(self, path: str, request: bytes, timeout_s: float) -> Any:
        kept, clock = self._take_idle(), asyncio.get_running_loop().time
        started = clock()
        try:
            try:
                response = await self._send(kept or await self._connect(timeout_s), request, timeout_s)
            except ConnectionLost as e:
                if kept is None or e.begun or self._closed or clock() - started > STALE_WITHIN_S:
                    raise
                response = await self._send(await self._connect(timeout_s), request, timeout_s)
        except TimeoutError as e:
            raise EngineFailure(f"{self.address}{path} did not answer within {timeout_s:g} s", "engine: timeout") from e
        except ConnectionLost as e:
            raise EngineFailure(f"{self.address}{path}: the connection was lost: {e}", "engine: connection lost") from e
        if response.status >= 300:
            text = " ".join(response.content.decode("utf-8", "replace").split())[:_QUOTED_CHARACTERS]
            raise EngineFailure(
                f"{self.address}{path} answered {response.status}: {text}", f"engine: HTTP {response.status}"
            )
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            return response.content.decode("utf-8", "replace")

    async def _send(self, connection: Connection, request: bytes, timeout_s: float) -> Response:
        self._busy.add(connection)
        answered = False
        try:
            response = await connection.request(request, timeout_s)
            answered = True
        finally:  # also if the task was cancelled together with the response
            self._busy.discard(connection)
            if answered and connection.usable and not self._closed:
                self._keep(connection)
            else:
                connection.close()
        return response

    async def _connect(self, timeout_s: float) -> Connection:
        limit_s = min(CONNECT_S, timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                return await self._origin.connect()
        except OSError as e:  # includes TimeoutError
            reason = str(e) or f"no connection within {limit_s:g} s"
            raise EngineFailure(f"{self.address} cannot be reached: {reason}", "engine: unreachable") from e

    # -- idle connections ----------------------------------------------------------------------------------------------

    def _keep(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_expired)

    def _take_idle(self) -> Connection | None:
        """The most recently used idle connection that is still open."""
        while self._idle:
            connection = self._idle.pop()
            expired = asyncio.get_running_loop().time() - connection.idle_since >= KEEP_ALIVE_S
            if connection.usable and not expired:
                return connection
            connection.close()
        return None

    def _close_expired(self) -> None:
        """Close connections that were idle for too long; runs again while there are others."""
        loop = asyncio.get_running_loop()
        limit = loop.time() - KEEP_ALIVE_S
        for connection in self._idle:
            if connection.idle_since <= limit:
                connection.close()
        self._idle = [c for c in self._idle if c.idle_since > limit]
        self._sweep = loop.call_at(self._idle[0].idle_since + KEEP_ALIVE_S, self._close_expired) if self._idle else None
