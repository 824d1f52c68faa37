"""Replaces the address of an sglang-router by those of its servers: a fleet balances the load and updates the weights of each server itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from agentrl.errors import ConfigError

TIMEOUT_S = 3.0


def servers_at(addresses: Sequence[str]) -> tuple[str, ...]:
    """The servers at these addresses, each once.

    Raises:
        ConfigError: a router has no servers, or servers without HTTP.
    """
    if not addresses:
        return ()
    with ThreadPoolExecutor(len(addresses)) as pool:
        return tuple(dict.fromkeys(server for servers in pool.map(_servers_behind, addresses) for server in servers))


def _servers_behind(address: str) -> list[str]:
    """The servers of the router at `address`; the address itself if it is not a router's, or does not answer."""
    try:
        response = httpx.get(f"{address}/workers", timeout=TIMEOUT_S, trust_env=False)
        content = response.json() if response.is_success else None
    except (httpx.HTTPError, ValueError):
        return [address]
    workers = content.get("workers") if isinstance(content, dict) else None
    if not isinstance(workers, list) or not all(isinstance(worker, dict) for worker in workers):
        return [address]
    # a server with several ranks is listed once for each, with @RANK at the end
    urls = [re.sub(r"@\d+$", "", str(worker.get("url", ""))).rstrip("/") for worker in workers]
    servers = list(dict.fromkeys(urls))
    others = [url for url in servers if not url.startswith(("http://", "https://"))]
    if others:
        raise ConfigError(f"the router at {address} has servers that do not speak HTTP: {', '.join(others)}")
    if not servers:
        raise ConfigError(f"the router at {address} has no servers; start them, or name their addresses instead")
    return servers
