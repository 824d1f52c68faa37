"""Free ports of this machine for servers, torch.distributed groups and others that listen only seconds after the port was chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from agentrl.errors import ConfigError

LOWEST_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_is_free(port: int) -> bool:
    """True if nothing listens on the port."""
    return _bound(port) is not None


def free_port() -> int:
    """Return a free port below the ephemeral range, from which the kernel assigns ports to other programs.

    Raises:
        ConfigError: no port is free.
    """
    try:
        limit = int(EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:  # not Linux
        limit = 32768
    candidates = range(LOWEST_PORT, max(LOWEST_PORT, limit))
    for port in [*random.SystemRandom().sample(candidates, min(100, len(candidates))), 0]:
        if bound := _bound(port):
            return bound
    raise ConfigError("there is no free port on this machine")


def _bound(port: int) -> int | None:
    """Return the port if it can be bound, else None. Port 0 binds any free port."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(s.getsockname()[1])
