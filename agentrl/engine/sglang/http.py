"""JSON over HTTP to one server, with a pool of kept-alive connections. Every fault is an EngineFailure with a short cause.

Only one kind of fault is retried: a kept-alive connection that the server closed while it was idle (SGLang does so after some seconds). The
request is then sent once more over a new connection, provided that no byte of a response arrived. Statuses from 300 up and connections lost
later are failures.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Coroutine
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from agentrl.engine.sglang.connection import Connection, ConnectionLost, Response, request_deadlines
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
        """`address` is http(s)://host[:port][/path], with user:password@ if the server requires them."""
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{address!r} is not the address of a server; expected http://host:port")
        self.address = address.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.hostname, url.port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._headers = f"Host: {host}:{self._port}\r\nAccept: */*\r\nUser-Agent: agentrl\r\n"
        if url.username is not None:
            credentials = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            self._headers += f"Authorization: Basic {base64.b64encode(credentials).decode()}\r\n"
        self._idle: dict[Connection, float] = {}
        """with the times since when, in this order"""
        self._sweep: asyncio.TimerHandle | None = None
        self._busy: set[Connection] = set()
        self._deadlines = request_deadlines()
        self._closed = False

    def post(self, path: str, body: Any, *, timeout_s: float) -> Coroutine[Any, Any, Any]:
        """Send `body` as JSON; returns the parsed response, or its text if it is not JSON.

        Raises:
            EngineFailure: no response in time, a lost connection, or a status from 300 up.
        """
        content = orjson.dumps(body)
        head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        return self._request("POST", path, head, content, timeout_s)

    def get(self, path: str, *, timeout_s: float) -> Coroutine[Any, Any, Any]:
        """Same as `post` without a body."""
        return self._request("GET", path, "", b"", timeout_s)

    async def close(self) -> None:
        """Close all connections; idempotent."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()

    async def _request(self, method: str, path: str, headers: str, content: bytes, timeout_s: float) -> Any:
        request = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{headers}\r\n".encode() + content
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
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._deadlines), self._host, self._port, ssl=self._tls
                )
                return connection
        except OSError as e:  # includes TimeoutError
            reason = str(e) or f"no connection within {limit_s:g} s"
            raise EngineFailure(f"{self.address} cannot be reached: {reason}", "engine: unreachable") from e

    # -- idle connections ----------------------------------------------------------------------------------------------

    def _keep(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_expired)

    def _take_idle(self) -> Connection | None:
        """The most recently used idle connection that is still open."""
        while self._idle:
            connection, since = self._idle.popitem()
            if connection.usable and asyncio.get_running_loop().time() - since < KEEP_ALIVE_S:
                return connection
            connection.close()
        return None

    def _close_expired(self) -> None:
        """Close connections that were idle for too long; runs again while there are others. One timer is cheaper than one for each."""
        loop = asyncio.get_running_loop()
        limit = loop.time() - KEEP_ALIVE_S
        for connection in [c for c, since in self._idle.items() if since <= limit]:
            del self._idle[connection]
            connection.close()
        oldest = next(iter(self._idle.values()), None)
        self._sweep = None if oldest is None else loop.call_at(oldest + KEEP_ALIVE_S, self._close_expired)
