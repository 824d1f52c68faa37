"""An sglang-router in front of servers: the fleet balances by itself and brings weights to servers, so it speaks to them, not to the router."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.errors import ConfigError

ANSWER_S = 3.0


def servers_at(addresses: Sequence[str]) -> tuple[str, ...]:
    """These addresses, each once, a router's replaced by those of its servers.

    Raises:
        ConfigError: a router has no servers, or some that are not spoken to by HTTP.
    """
    if not addresses:
        return ()
    with ThreadPoolExecutor(len(addresses)) as pool:
        return tuple(dict.fromkeys(server for found in pool.map(_behind, addresses) for server in found))


def _behind(address: str) -> tuple[str, ...]:
    """The servers of the router at `address`; the address itself, if what is there is no router or does not answer."""
    import httpx

    try:
        answer = httpx.get(f"{address}/workers", timeout=ANSWER_S, trust_env=False)
        found = answer.json() if answer.is_success else None
    except (httpx.HTTPError, ValueError):
        return (address,)
    workers = found.get("workers") if isinstance(found, dict) else None
    if not isinstance(workers, list):
        return (address,)
    servers = tuple(dict.fromkeys(map(_url, workers)))  # a server that it counts once for each of its ranks is one
    others = [url for url in servers if not url.startswith(("http://", "https://"))]
    if others:
        raise ConfigError(f"the router at {address} has servers that do not speak HTTP: {', '.join(others)}")
    if not servers:
        raise ConfigError(f"the router at {address} has no servers; start them, or name them instead")
    return servers


def _url(worker: Any) -> str:
    return re.sub(r"@\d+$", "", str(worker.get("url", ""))).rstrip("/")
