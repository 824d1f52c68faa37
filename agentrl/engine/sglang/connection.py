"""One kept-alive HTTP/1.1 connection: an asyncio protocol that sends one request at a time and parses the response with httptools.

It supports Content-Length, chunked bodies, bodies that end with the connection, and interim responses such as `100 Continue`. It does not
support redirects, cookies, compression or pipelining.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import httptools

from agentrl.core.deadlines import Deadlines

MAX_HEAD_BYTES = 1 << 16


class Response(NamedTuple):
    """A complete HTTP response."""

    status: int
    content: bytes


class ConnectionLost(ConnectionError):
    """The connection ended before the response was complete. `begun`: part of the response had arrived."""

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


def request_deadlines() -> Deadlines[asyncio.Future[Response]]:
    """The time limits of requests, by the future of the response."""
    return Deadlines(_time_out)


def _time_out(pending: asyncio.Future[Response]) -> None:
    if not pending.done():
        pending.set_exception(TimeoutError())


class Connection(asyncio.Protocol):
    """One connection to a server. `deadlines` are those of all its client's connections (`request_deadlines`)."""

    def __init__(self, deadlines: Deadlines[asyncio.Future[Response]]) -> None:
        self._deadlines = deadlines
        self.transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # which RFC 9112 allows
        self._pending: asyncio.Future[Response] | None = None
        self._body: list[bytes] = []
        self._head_bytes = 0
        """bytes received since the last complete response, while its headers are incomplete"""
        self._in_response = self._in_body = False
        self._framed = False
        """the headers give the end of the body"""
        self._reusable = True

    @property
    def usable(self) -> bool:
        """Another request may be sent."""
        return self._reusable and not self._in_response and not self.transport.is_closing()

    async def request(self, request: bytes, timeout_s: float) -> Response:
        """Send a request and return the response. The connection is closed unless a response arrives.

        Raises:
            ConnectionLost: the server closed the connection, or its response is not HTTP.
            TimeoutError: no response in time.
        """
        if self.transport.is_closing():
            raise ConnectionLost("the server closed it", begun=False)
        pending: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pending = pending
        self._deadlines.add(pending, timeout_s)
        try:
            self.transport.write(request)
            return await pending
        finally:
            self._deadlines.remove(pending)
            self._pending = None
            if not pending.done() or pending.cancelled() or pending.exception() is not None:
                self.transport.abort()

    def close(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    # -- called by the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
                raise httptools.HttpParserError(f"the headers exceed {MAX_HEAD_BYTES} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            self._fail(ConnectionLost(f"the response is not HTTP: {e}", begun=True))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._in_body and not self._framed and exc is None:
            self._complete()
        self._fail(ConnectionLost(str(exc or "the server closed it"), begun=self._head_bytes > 0))

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._pending is None or self._pending.done():
            self._reusable = False  # a response without a request
        self._in_response, self._framed = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._reusable &= self._parser.should_keep_alive()
        self._complete()

    # -- the pending request -------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        status, content = self._parser.get_status_code(), b"".join(self._body)
        self._body.clear()
        self._head_bytes, self._in_response, self._in_body = 0, False, False
        if status < 200:  # an interim response; the final one follows
            return
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(Response(status, content))

    def _fail(self, error: Exception) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)
