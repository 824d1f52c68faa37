"""Which way the weights take, by the settings and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from agentrl.config import EngineSettings
from agentrl.engine.base import Engine
from agentrl.engine.local.adapter_engines import AdapterEngines
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.plan import ServerPlan, on_gpus, sync_kind
from agentrl.engine.weight_files import weight_bytes
from agentrl.weight_sync.adapters import FleetAdapterSync, LocalAdapterSync
from agentrl.weight_sync.base import WeightSync, memory_for
from agentrl.weight_sync.broadcast import BroadcastSync
from agentrl.weight_sync.colocated import ColocatedSync
from agentrl.weight_sync.disk import DiskSync, LocalDiskSync


def make_weight_sync(
    settings: EngineSettings,
    servers: ServerPlan | None,
    engine: Engine,
    model: Path,
    versions: Mapping[str, int] = MappingProxyType({}),
) -> WeightSync:
    """The way the trainer's weights reach `engine`.

    Args:
        settings: of the engine.
        servers: SGLang's; None for the local engine.
        engine: what receives the weights.
        model: the model's folder, for the size of its weights.
        versions: the current version of each of several adapters; empty: there is one set of weights.
    """
    if settings.update_weight_disk_dir:
        folder: Path | None = Path(settings.update_weight_disk_dir).absolute()
    else:
        folder = memory_for(weight_bytes(model))
    if isinstance(engine, AdapterEngines):
        return LocalAdapterSync(engine, versions, folder)
    if servers is None or not isinstance(engine, Fleet):
        return LocalDiskSync(engine, folder)
    if versions:
        return FleetAdapterSync(engine, versions, folder)
    kind = sync_kind(settings)
    if kind == "disk":
        return DiskSync(engine, folder)
    if kind == "split":
        return BroadcastSync(engine, folder, bucket_bytes=settings.update_weight_buffer_size)
    share_gpus = settings.colocate and on_gpus(servers)
    return ColocatedSync(engine, folder, bucket_bytes=settings.update_weight_buffer_size, share_gpus=share_gpus)
