"""One HTTP server as an engine's client sees it: JSON in, JSON out, and every fault an EngineFailure with a short cause.

Retried is one thing only: a kept-alive connection that the server closed before any byte of the answer came (SGLang closes idle ones
after some seconds). It is asked once more on a fresh connection. A 4xx is never retried, a 5xx and a lost connection are failures.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from agentrl.errors import EngineFailure

KEEP_ALIVE_S = 4.0
"""idle connections are dropped by us before the server does it"""
CONNECT_S = 10.0
_QUOTED = 400
"""characters of an error page that are quoted"""


class HttpClient:
    """JSON over HTTP/1.1 to one address. Made and used on one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._kept: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Any, *, timeout_s: float) -> Any:
        """Send `body` as JSON; returns the parsed answer (text where it is no JSON).

        Raises:
            EngineFailure: no answer in time, a lost connection, or a status from 400 up.
        """
        return await self._ask("POST", path, orjson.dumps(body), timeout_s)

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """As `post`, without a body."""
        return await self._ask("GET", path, None, timeout_s)

    async def close(self) -> None:
        """Drop all connections; idempotent."""
        for session in (self._kept, self._fresh):
            if session is not None:
                await session.close()
        self._kept = self._fresh = None

    def _sessions(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        if self._kept is None or self._fresh is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._kept = aiohttp.ClientSession(connector=kept, trace_configs=[trace], auto_decompress=True)
            self._fresh = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self._kept, self._fresh

    async def _ask(self, method: str, path: str, data: bytes | None, timeout_s: float) -> Any:
        kept, fresh = self._sessions()
        noted = SimpleNamespace(reused=False)
        try:
            try:
                return await self._once(kept, method, path, data, timeout_s, noted)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as e:
                if not (noted.reused and _before_any_byte(e)):
                    raise
            return await self._once(fresh, method, path, data, timeout_s, noted)
        except TimeoutError as e:
            raise EngineFailure(f"{self.address}{path} did not answer within {timeout_s:g} s", "engine: timeout") from e
        except aiohttp.ClientConnectorError as e:
            raise EngineFailure(f"{self.address} cannot be reached: {e}", "engine: unreachable") from e
        except aiohttp.ClientError as e:
            what = str(e) or type(e).__name__
            raise EngineFailure(
                f"{self.address}{path}: the connection was lost: {what}", "engine: connection lost"
            ) from e

    async def _once(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None, timeout_s: float, noted: Any
    ) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        headers = {"Content-Type": "application/json"} if data is not None else None
        url = self.address + path
        async with session.request(
            method, url, data=data, headers=headers, timeout=limit, trace_request_ctx=noted
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise self._refused(path, answer.status, content)
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return content.decode("utf-8", "replace")

    def _refused(self, path: str, status: int, content: bytes) -> EngineFailure:
        said = " ".join(content.decode("utf-8", "replace").split())[:_QUOTED]
        return EngineFailure(f"{self.address}{path} answered {status}: {said}", f"engine: HTTP {status}")


async def _note_reuse(_: Any, context: Any, __: Any) -> None:
    context.trace_request_ctx.reused = True


def _before_any_byte(error: Exception) -> bool:
    """A closed connection of which nothing of the answer had come: aiohttp hands over the head of an answer that it had begun to read."""
    return not isinstance(error, aiohttp.ServerDisconnectedError) or isinstance(error.message, str)
