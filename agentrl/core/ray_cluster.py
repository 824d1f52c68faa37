"""A ray cluster: connected to, and what it has. ray is imported only when it is used."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from agentrl.errors import ConfigError

CONNECT_S = 10.0
PLACE_S = 60.0
"""How long the cluster may take to reserve what it has."""


def connect(address: str) -> None:
    """Connect this process to a ray cluster, or start one on this machine (`local`). Does nothing if it is connected.

    Raises:
        ConfigError: ray is missing, or no cluster answers.
    """
    try:
        import ray
    except ImportError as e:
        raise ConfigError("--ray-address needs ray: pip install 'agentrl[ray]'") from e
    if ray.is_initialized():
        return
    _check_reachable(address)
    quiet = {
        "log_to_driver": False,
        "logging_level": "error",
        "include_dashboard": False if address == "local" else None,
    }
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ConfigError(f"--ray-address {address}: no ray cluster answers ({str(e)[:200]})") from e


def bundle_of(gpus: int) -> dict[str, float]:
    """What a process with `gpus` GPUs takes of a node: these, and a CPU. A cluster without GPUs runs it on a CPU."""
    import ray

    return {"CPU": 1.0, **({"GPU": float(gpus)} if gpus and ray.cluster_resources().get("GPU") else {})}


def reserve(bundle: Mapping[str, float], number: int, strategy: str) -> Any:
    """A placement group of `number` bundles.

    Raises:
        ConfigError: the cluster does not reserve it in time.
    """
    import ray

    group = ray.util.placement_group([dict(bundle)] * number, strategy=strategy)
    if not group.wait(timeout_seconds=PLACE_S):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"the ray cluster did not reserve {number} × {bundle} within {PLACE_S:g} s: other jobs hold its resources; "
            f"available now: {listed(ray.available_resources())}"
        )
    return group


def options_of(group: Any, index: int, bundle: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that takes bundle `index` of a placement group; it waits while no node has the bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": place}


def release(group: Any) -> None:
    """Give the resources of a placement group back; idempotent."""
    import ray

    if ray.is_initialized():
        ray.util.remove_placement_group(group)


def _check_reachable(address: str) -> None:
    """ray.init would wait for minutes where nobody listens."""
    if address in ("auto", "local"):
        return
    parts = urlsplit(address if "://" in address else f"ray-gcs://{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"--ray-address takes auto, local or HOST:PORT, found {address!r}")
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as e:
        raise ConfigError(f"--ray-address {address}: no ray cluster answers ({e})") from e


def listed(total: Mapping[str, float]) -> str:
    """CPUs and GPUs in words."""
    return ", ".join(f"{total.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
