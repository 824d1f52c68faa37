"""One kept-alive HTTP/1.1 connection on a bare asyncio protocol: a request out, an answer in, at a quarter of a client library's cost.

It speaks what inference servers speak: Content-Length, chunked bodies, bodies that end with the connection, `100 Continue`. No
redirects, no cookies, no compression (none is asked for), no pipelining.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit

_MAX_HEAD = 1 << 16


class Answer(NamedTuple):
    """What a server said."""

    status: int
    content: bytes


class Lost(ConnectionError):
    """The connection ended before the answer did. `begun`: some of the answer had come."""

    def __init__(self, what: str, *, begun: bool) -> None:
        super().__init__(what)
        self.begun = begun


class Origin:
    """Where a server is, and the head that every request to it begins with."""

    def __init__(self, address: str) -> None:
        """`address` is http(s)://host[:port][/path], with user:password@ where the server wants them."""
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{address!r} is no address of a server; expected http://host:port")
        self.host = url.hostname
        self.tls = ssl.create_default_context() if url.scheme == "https" else None
        self.port = url.port or (443 if self.tls else 80)
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"Host: {host}:{self.port}", "Accept: */*", "User-Agent: agentrl"]
        if url.username is not None:
            secret = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            lines.append(f"Authorization: Basic {base64.b64encode(secret).decode()}")
        self._path = url.path.rstrip("/")
        self._head = "\r\n".join(lines)

    async def connect(self) -> Connection:
        """A new connection.

        Raises:
            OSError: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self.host, self.port, ssl=self.tls)
        return made

    def request(self, method: str, path: str, body: bytes | None) -> bytes:
        """A request, ready to be sent."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}\r\n"
        if body is None:
            return f"{head}\r\n".encode()
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.transport: asyncio.Transport
        self._buffer = b""
        self._length = -1
        """of the body; -1: the head has not come; None: known at its end"""
        self._status = 0
        self._chunked = self._until_end = self._closes = False
        self._waiter: asyncio.Future[Answer] | None = None

    @property
    def usable(self) -> bool:
        """The next request may go over it."""
        said = self._buffer or self._length != -1 or self._until_end  # of something that nobody asked for
        return not (said or self._closes or self.transport.is_closing())

    async def ask(self, request: bytes, timeout_s: float) -> Answer:
        """Send a request and wait for the answer; without one the connection is closed.

        Raises:
            Lost: it was closed by the server.
            TimeoutError: no answer in time.
        """
        if self.transport.is_closing():
            raise Lost("the server closed it", begun=False)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Answer] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(timeout_s, self._late)
        try:
            self.transport.write(request)
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None
            if not waiter.done() or waiter.cancelled() or waiter.exception() is not None:
                self.transport.abort()

    def close(self) -> None:
        """Drop it."""
        self.transport.abort()

    # -- what the event loop calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """A part of an answer, often all of it."""
        self._buffer = self._buffer + data if self._buffer else data
        try:
            while self._waiter is not None and self._length < 0 and not self._until_end:
                if not self._read_head():
                    return
            if self._chunked:
                content = unchunked(self._buffer)
                if content is not None:
                    self._done(*content)
            elif not self._until_end and 0 <= self._length <= len(self._buffer):
                self._done(self._buffer[: self._length], self._buffer[self._length :])
        except ValueError as e:
            self._fail(Lost(f"the answer is no HTTP: {e}", begun=True))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._until_end and exc is None:
            self._done(self._buffer, b"")
        begun = bool(self._buffer) or self._length >= 0 or self._until_end
        self._fail(Lost(str(exc or "the server closed it"), begun=begun))

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        """Take the head of an answer from the buffer; False if it is not all there."""
        if not b"http/1.".startswith(self._buffer[:7].lower()):
            raise ValueError(f"it begins with {self._buffer[:20]!r}")
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise ValueError(f"its head is longer than {_MAX_HEAD} bytes")
            return False
        head = self._buffer[:end].lower()
        self._buffer = self._buffer[end + 4 :]
        status = _number(head[9:12], 10)
        if status < 200:  # 100 Continue: the answer proper follows
            return True
        self._status = status
        connection = _header(head, b"connection")
        self._closes = connection == b"close" or (head.startswith(b"http/1.0") and connection != b"keep-alive")
        length = _header(head, b"content-length")
        if b"chunked" in _header(head, b"transfer-encoding"):
            self._chunked, self._length = True, 0
        elif length:
            self._length = _number(length, 10)
        elif status in (204, 304):
            self._length = 0
        else:
            self._until_end = self._closes = True
        return True

    def _done(self, content: bytes, rest: bytes) -> None:
        waiter, answer = self._waiter, Answer(self._status, content)
        self._buffer, self._length, self._chunked, self._until_end = rest, -1, False, False
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _late(self) -> None:
        self._fail(TimeoutError())


def _header(head: bytes, name: bytes) -> bytes:
    """The value of a header in a head of lower case; b'' if it is not there."""
    at = head.find(b"\r\n" + name + b":")
    if at < 0:
        return b""
    at += len(name) + 3
    end = head.find(b"\r\n", at)
    return head[at : end if end >= 0 else None].strip()


def _number(text: bytes, base: int) -> int:
    """As `int`, of digits alone: no sign, no underscore, no prefix."""
    if not text.isalnum() or b"x" in text.lower():
        raise ValueError(f"{text[:20]!r} is no number")
    return int(text, base)


def unchunked(data: bytes) -> tuple[bytes, bytes] | None:
    """The body of a chunked answer and what follows it; None if it is not all there.

    Raises:
        ValueError: no chunks.
    """
    parts: list[bytes] = []
    at = 0
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            return None
        size = _number(data[at:line].split(b";", 1)[0].rstrip(), 16)
        at = line + 2
        if size == 0:
            end = data.find(b"\r\n\r\n", line) if data[at : at + 2] != b"\r\n" else line
            return None if end < 0 or len(data) < end + 4 else (b"".join(parts), data[end + 4 :])
        if len(data) < at + size + 2:
            return None
        parts.append(data[at : at + size])
        at += size + 2
        if data[at - 2 : at] != b"\r\n":
            raise ValueError(f"a chunk of {size} bytes is longer than it says")
