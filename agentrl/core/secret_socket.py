"""TCP connections between processes of one run, of which each proves to the other that it knows the run's secret.

Objects are pickles, so nothing is read from a peer before its proof. The proof is HMAC-SHA256 over random numbers of both sides and the side that
proves. What follows is neither encrypted nor signed: it belongs on a private network.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from multiprocessing.connection import Connection

from agentrl.errors import WorkerError

HANDSHAKE_S = 10.0
"""limit of each part of a proof"""
STALL_S = 60
"""a peer that neither reads nor writes a byte of a message for this long is considered hung"""
_SIZE = 32
_LISTENS, _DIALS = b"agentrl listens", b"agentrl dials"
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 60_000}
"""a machine that disappeared is noticed within these seconds (the last in ms)"""


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
