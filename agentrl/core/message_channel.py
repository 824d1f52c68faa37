"""Messages between two processes of agentrl over a socket.

A message is a header (kind, request number, length) and a payload, usually a pickle. Either side sees the other's death as end of file.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import IntEnum
from typing import Self

_HEADER = struct.Struct("!BQQ")
"""message kind, request number, payload length"""


class MessageKind(IntEnum):
    """The first byte of a message."""

    OPEN = 0
    """a rollout begins, with these settings and servers; answered when its runner is ready"""
    RUN = 1
    """play this episode"""
    CANCEL = 2
    """cancel that request; not answered"""
    CLOSE = 3
    """the rollout is over: cancel all episodes and close the engine"""
    RESULT = 4
    """the answer to a request"""
    ERROR = 5
    """the exception that a request raised"""
    NOTICE = 6
    """a runner's notice, or None as a heartbeat; not an answer"""
    SERVERS = 7
    """the servers of the rollout are at these addresses now; not answered"""


class Channel:
    """Messages over one end of a socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.drain = writer.drain
        self.close = writer.close

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))

    def send(self, kind: MessageKind, number: int, payload: bytes) -> None:
        """Write to the buffer; await `drain` where data could accumulate."""
        self._writer.write(_HEADER.pack(kind, number, len(payload)) + payload)

    async def receive(self) -> tuple[MessageKind, int, bytes]:
        """The next message.

        Raises:
            EOFError, OSError: the other side is gone.
        """
        kind, number, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        return MessageKind(kind), number, await self._reader.readexactly(length)
