"""The gateway's HTTP server: one secret per episode, given as API key or in the path; one route per protocol.

/v1/chat/completions  /v1/responses  /v1/messages  /v1/messages/count_tokens  /v1/models    (also without /v1, and behind /episode/KEY)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agentrl.errors import ConfigError
from agentrl.gateway.anthropic_messages import MESSAGES
from agentrl.gateway.known_requests import KnownRequests, to_json
from agentrl.gateway.openai_chat import CHAT
from agentrl.gateway.openai_responses import RESPONSES
from agentrl.gateway.protocol import Event, ModelRequest, Protocol, RequestError
from agentrl.gateway.session import Exchange, GatewaySession
from agentrl.render.truncation import LONG_TEXT

logger = logging.getLogger(__name__)

MAX_BODY = 32 << 20
"""bytes of a request"""
REST_S = 1.0
"""How long the rest of a request is read that was refused before its end, also while the gateway closes."""
READ_TIMEOUT_S = 60.0
"""time in which a request's body must arrive"""
WRITE_TIMEOUT_S = 60.0
"""time in which a client must take an answer"""
KEEP_ALIVE_S = 10.0
"""after this time without a generation a stream begins, and sends a sign of life each time"""
_SMALL_ANSWER = 1 << 14
"""bytes; asyncio's connections buffer four times as many before a writer has to wait"""
_MAX_ENDED = 1 << 16
"""keys of ended episodes that are remembered"""
_JSON = {"Content-Type": "application/json"}
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_NO_RETRY = {**_JSON, "x-should-retry": "false"}
_PATH_KEY = "/episode/"
_UNKNOWN = "unknown or missing key; send the episode's key as API key (Authorization: Bearer KEY, or x-api-key: KEY)"


class Route(NamedTuple):
    """What a path serves."""

    protocol: Protocol
    counts: bool = False
    """count tokens instead of sampling"""


ROUTES: dict[str, Route] = {
    "/chat/completions": Route(CHAT),
    "/responses": Route(RESPONSES),
    "/messages": Route(MESSAGES),
    "/messages/count_tokens": Route(MESSAGES, counts=True),
}
"""POST, by the path after /v1"""


class _leave_slow_client:  # noqa: N801  used as a statement: `with _leave_slow_client(request):`
    """Disconnects a client that does not read its answer in time, which frees the answer's memory. A client that has already left is not an error."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, (TimeoutError, ConnectionError)):
            return False
        logger.debug("a client left before it had its answer: %s", error)
        if self._request.transport is not None:
            self._request.transport.abort()
        return True


class GatewayServer:
    """Serves the sessions that are registered with it.

    Args:
        host: address to listen on.
        port: 0: any free port.
        open_session: makes the session of an unknown key (a gateway that stands alone); None: unknown keys are refused.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        open_session: Callable[[str], Awaitable[GatewaySession]] | None = None,
    ) -> None:
        self.host, self.port = host, port
        self._open_session = open_session
        self._sessions: dict[bytes, GatewaySession] = {}
        """by the hash of their key: keys are kept nowhere"""
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        """The base address, without /v1."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        server = web.Server(self._handle, access_log=None, keepalive_timeout=75.0, lingering_time=REST_S)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=4096)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            reason = os.strerror(e.errno) if e.errno else str(e)
            raise ConfigError(
                f"the gateway cannot listen on {self.host}:{self.port}: {reason}; choose another --gateway-port or --gateway-host"
            ) from e
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._runner is not None:
            await self._runner.shutdown()
            await self._runner.cleanup()
            self._runner = None

    def register(self, session: GatewaySession, key: str | None = None) -> str:
        """Serve a session. Returns its key, a new secret unless one is given."""
        key = key or f"agentrl-{secrets.token_urlsafe(24)}"
        self._sessions[_hashed(key)] = session
        return key

    def unregister(self, key: str) -> None:
        """Refuse the key's further requests as those of an ended episode."""
        hashed = _hashed(key)
        self._sessions.pop(hashed, None)
        self._ended[hashed] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def forget(self, key: str) -> None:
        """Serve a key no longer; its next request is that of an unknown key."""
        self._sessions.pop(_hashed(key), None)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, key = _split_path(request)
        route = ROUTES.get(path)
        protocol = route.protocol if route else CHAT
        try:
            session = await self._session(key)
            if request.method == "GET" and path.startswith("/models"):
                return _models(session, path)
            if route is None or request.method != "POST":
                known = ", ".join(f"/v1{p}" for p in ROUTES)
                raise RequestError(404, f"{request.method} {path:.80} is not served; known: {known}", "not_found")
            body = await _read_body(request)
            asked = _parse(body, protocol, session)
            if route.counts:
                session.check_model(asked.model)
                return _response({"input_tokens": session.count_tokens(asked)})
            retried = request.headers.get("x-stainless-retry-count", "0") != "0"
            fingerprint = path, hashlib.sha256(body).digest()
            exchange = session.exchange(
                asked, fingerprint, long=len(body) > LONG_TEXT, retried=retried, connection=request.transport
            )
            return await _answer(request, protocol, asked, exchange, session.known)
        except RequestError as e:
            return _error_response(protocol, e)

    async def _session(self, key: str) -> GatewaySession:
        hashed = _hashed(key)
        session = self._sessions.get(hashed)
        if session is None and hashed in self._ended:
            raise RequestError(
                403, "the episode of this key has ended; no further request is answered", "episode_ended"
            )
        if session is None and key and self._open_session is not None:
            session = await self._open_session(key)
        if session is None:
            raise RequestError(401, _UNKNOWN, "invalid_api_key")
        return session


async def _answer(
    request: web.BaseRequest, protocol: Protocol, asked: ModelRequest, exchange: Exchange, known: KnownRequests
) -> web.StreamResponse:
    """Wait for the exchange and write its answer; note whether the client took it."""
    if asked.stream and not await _ended(exchange.task, KEEP_ALIVE_S):
        return await _stream(request, protocol, asked, exchange)
    replies = await exchange.replies()
    for reply in (r for r in replies if r.message):
        known.add_answer(protocol.returned(reply), reply.message)
    if not asked.stream:
        return await _write(request, _response(protocol.write(asked, replies)), exchange)
    events = b"".join(map(event_bytes, protocol.events(asked, replies)))
    return await _write(request, web.Response(body=events, headers=_EVENTS), exchange)


async def _write(request: web.BaseRequest, response: web.Response, exchange: Exchange) -> web.Response:
    """Write a whole answer; note whether the client took it."""
    if _fits(request, response):  # aiohttp writes it as soon as it is returned
        exchange.delivered |= _is_connected(request)
        return response
    with _leave_slow_client(request):
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
        exchange.delivered |= _is_connected(request)
    return response


async def _ended(task: asyncio.Task[Any], within_s: float) -> bool:
    """Wait some time for a task, which continues afterwards; whether it has ended."""
    if task.done():
        return True
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    wake = partial(_wake, ended)
    task.add_done_callback(wake)
    timer = loop.call_later(within_s, wake, None)
    try:  # asyncio.wait for one task, at half the cost
        await ended
    finally:
        task.remove_done_callback(wake)
        timer.cancel()
    return task.done()


def _wake(ended: asyncio.Future[None], _: object) -> None:
    if not ended.done():
        ended.set_result(None)


async def _stream(
    request: web.BaseRequest, protocol: Protocol, asked: ModelRequest, exchange: Exchange
) -> web.StreamResponse:
    """Write an answer that takes long as server-sent events: signs of life until the generation is there."""
    response = web.StreamResponse(headers=_EVENTS)
    with _leave_slow_client(request):
        async with asyncio.timeout(None) as limit:
            ended = False
            while not ended:
                limit.reschedule(asyncio.get_running_loop().time() + KEEP_ALIVE_S + WRITE_TIMEOUT_S)
                await response.prepare(request)
                await response.write(protocol.keep_alive)
                ended = await _ended(exchange.task, KEEP_ALIVE_S)
            limit.reschedule(asyncio.get_running_loop().time() + WRITE_TIMEOUT_S)
            await response.write(await _late_events(protocol, asked, exchange))
            await response.write_eof()
            exchange.delivered |= _is_connected(request)
    return response


async def _late_events(protocol: Protocol, asked: ModelRequest, exchange: Exchange) -> bytes:
    """The events of a stream that has begun; an error is an event too."""
    try:
        return b"".join(map(event_bytes, protocol.events(asked, await exchange.replies())))
    except RequestError as e:
        return event_bytes(Event(protocol.error(e), "error"))


def event_bytes(event: Event) -> bytes:
    """A server-sent event as it is written."""
    data = event.data.encode() if isinstance(event.data, str) else to_json(event.data)
    name = f"event: {event.name}\n".encode() if event.name else b""
    return name + b"data: " + data + b"\n\n"


def _split_path(request: web.BaseRequest) -> tuple[str, str]:
    """The path after /v1, and the key: of the path, else of a header."""
    path = request.path
    key = ""
    if path.startswith(_PATH_KEY):
        key, _, rest = path.removeprefix(_PATH_KEY).partition("/")
        path = f"/{rest}"
    if path.startswith("/v1/"):
        path = path[3:]
    if not key:
        bearer = request.headers.get("Authorization", "")
        key = bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
    return path.rstrip("/") or "/", key


async def _read_body(request: web.BaseRequest) -> bytes:
    """The body of a request.

    Raises:
        RequestError: it is too large, or does not arrive in time.
    """
    too_large = RequestError(413, f"the request has more than {MAX_BODY >> 20} MiB; shorten it", "request_too_large")
    if (request.content_length or 0) > MAX_BODY:
        raise too_large
    if request.content.is_eof():  # the whole body has arrived
        whole = request.content.read_nowait()
        if len(whole) > MAX_BODY:
            raise too_large
        return whole
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise RequestError(408, f"the request's body did not arrive within {READ_TIMEOUT_S:g} s", "timeout") from None
    except (HttpProcessingError, web.RequestPayloadError) as e:
        raise RequestError(400, f"the request's body cannot be read: {type(e).__name__}") from e
    return bytes(body)


def _parse(body: bytes, protocol: Protocol, session: GatewaySession) -> ModelRequest:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise RequestError(400, f"the body is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, found {type(value).__name__}")
    return protocol.read(value, session.known)


def _models(session: GatewaySession, path: str) -> web.Response:
    """GET /models and /models/NAME."""
    listed = [
        {"id": m, "object": "model", "type": "model", "display_name": m, "created": 0, "created_at": "1970-01-01T00:00:00Z",
         "owned_by": "agentrl"}
        for m in (*session.models, *session.side_models)
    ]  # fmt: skip
    name = path.removeprefix("/models").removeprefix("/")
    if name:
        session.check_model(name)
        return _response(next(m for m in listed if m["id"] == name))
    return _response({"object": "list", "data": listed, "has_more": False, "first_id": None, "last_id": None})


def _response(body: Mapping[str, Any]) -> web.Response:
    return web.Response(body=to_json(body), headers=_JSON)


def _error_response(protocol: Protocol, failure: RequestError) -> web.Response:
    return web.Response(body=orjson.dumps(protocol.error(failure)), status=failure.status, headers=_NO_RETRY)


def _fits(request: web.BaseRequest, response: web.Response) -> bool:
    """Whether an answer fits into the connection's buffer, so that writing it never waits for the client."""
    body, transport = response.body, request.transport
    small = isinstance(body, bytes) and len(body) <= _SMALL_ANSWER
    return small and transport is not None and not transport.get_write_buffer_size()


def _is_connected(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _hashed(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
