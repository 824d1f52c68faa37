"""Ports of this machine, for what listens on one only seconds after it was chosen: a server, the ranks' meeting place, a group for weights."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from agentrl.errors import ConfigError

LEAST_PORT = 10_000
GIVEN_BY_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_is_free(port: int) -> bool:
    """Nobody listens on it."""
    return _bound(port) is not None


def free_port() -> int:
    """A port that was free a moment ago, below those that the kernel gives to whoever asks for any."""
    try:
        above = int(GIVEN_BY_THE_KERNEL.read_text().split()[0])
    except OSError:  # no Linux
        above = 32768
    below = range(LEAST_PORT, max(LEAST_PORT, above))
    for port in [*random.SystemRandom().sample(below, min(100, len(below))), 0]:
        if found := _bound(port):
            return found
    raise ConfigError("there is no free port on this machine")


def _bound(port: int) -> int | None:
    """The port (for 0: any), if it can be listened on."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(s.getsockname()[1])
