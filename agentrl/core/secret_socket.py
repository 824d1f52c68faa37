"""TCP connections between processes of one run, of which each proves to the other that it knows the run's secret.

Objects are pickles, so nothing is read from a peer before its proof. The proof is HMAC-SHA256 over random numbers of both sides and the side that
proves. What follows is neither encrypted nor signed: it belongs on a private network.
"""

from __future__ import annotations

import hmac
import logging
import os
import platform
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from agentrl.errors import WorkerError

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""limit of each part of a proof"""
STALL_S = 60
"""a peer that neither reads nor writes a byte of a message for this long is considered hung"""
_SIZE = 32
_LISTENS, _DIALS = b"agentrl listens", b"agentrl dials"
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 60_000}
"""a machine that disappeared is noticed within these seconds (the last in ms)"""
_PACKAGES = ("agentrl", "torch", "megatron-core")


class Controller(NamedTuple):
    """Where the controller of a run listens."""

    host: str
    port: int
    secret: bytes


class Listener:
    """Admits processes that know the run's secret, which is drawn here.

    Args:
        host: an address of this machine.
        port: 0: any.
        admit: called with a peer's first message, its connection and its host, in a thread for each peer.
    """

    def __init__(self, host: str, port: int, admit: Callable[[Any, Connection, str], None]) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be used.
        """
        self._admit = admit
        self._socket = socket.create_server((host, port), backlog=128)
        self.controller = Controller(host, self._socket.getsockname()[1], secrets.token_bytes(_SIZE))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._receive_hello, args=(sock,), daemon=True).start()

    def _receive_hello(self, sock: socket.socket) -> None:
        try:
            peer = sock.getpeername()[0]
            connection = accept(sock, self.controller.secret)
            hello = connection.recv()
        except (OSError, EOFError, WorkerError) as e:
            logger.warning("a connection to port %d was refused: %s", self.controller.port, e)
            return
        self._admit(hello, connection, peer)

    def close(self) -> None:
        """Admit nobody any more; idempotent."""
        self._socket.close()


def dial(host: str, port: int, secret: bytes) -> Connection:
    """Connect to a process that listens.

    Raises:
        OSError: nothing listens there, or it does not answer.
        WorkerError: it does not know the secret.
    """
    sock = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    try:
        ours = os.urandom(_SIZE)
        theirs = _receive(sock)
        sock.sendall(ours + _proof(secret, _DIALS, theirs, ours))
        if not hmac.compare_digest(_receive(sock), _proof(secret, _LISTENS, ours, theirs)):
            raise WorkerError(f"the process at {host}:{port} does not know the secret of this run")
        return _connection(sock)
    finally:
        sock.close()


def accept(sock: socket.socket, secret: bytes) -> Connection:
    """The connection of a peer that dialled; `sock` is closed.

    Raises:
        OSError: it does not answer.
        WorkerError: it does not know the secret.
    """
    try:
        sock.settimeout(HANDSHAKE_S)
        ours = os.urandom(_SIZE)
        sock.sendall(ours)
        theirs, proof = _receive(sock), _receive(sock)
        if not hmac.compare_digest(proof, _proof(secret, _DIALS, ours, theirs)):
            raise WorkerError("a peer does not know the secret of this run")
        sock.sendall(_proof(secret, _LISTENS, theirs, ours))
        return _connection(sock)
    finally:
        sock.close()


def versions() -> dict[str, str]:
    """Versions that must be equal in all processes of a run, of what is installed."""
    installed = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def differing_version(theirs: Mapping[str, str]) -> str | None:
    """What the `versions` of another process and of this one differ in, and what to do; None: nothing."""
    ours = versions()
    for name, version in theirs.items():
        if ours.get(name, version) != version:
            return f"has {name} {version}, this machine {ours[name]}; install equal versions"
    return None


def limit_stalls(sock: socket.socket) -> None:
    """Let an operation on a blocking socket fail if the peer hangs in the middle of a message."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))


def _proof(secret: bytes, side: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, side + challenge + own, "sha256")


def _receive(sock: socket.socket) -> bytes:
    data = b""
    while len(data) < _SIZE:
        part = sock.recv(_SIZE - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection before its proof")
        data += part
    return data


def _connection(sock: socket.socket) -> Connection:
    sock.settimeout(None)
    limit_stalls(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(sock.detach())
