"""Several adapters to an engine: those that a step changed, each with its own version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

from agentrl.engine.local.adapter_engines import AdapterEngines
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import WeightSync


class LocalAdapterSync(WeightSync):
    """The merged weights of each adapter to its local engine, through a folder whose fingerprint the engine verifies.

    Args:
        engines: of all adapters.
        versions: the current version of each adapter, which the owner changes.
        folder: see `WeightSync`.
    """

    def __init__(self, engines: AdapterEngines, versions: Mapping[str, int], folder: Path | None = None) -> None:
        super().__init__(engines, folder)
        self.engines, self.versions = engines, versions
        self._sent: dict[str, int] = {}

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        """See `WeightSync.update`; adapters that have not changed since the last sync are left out."""
        for name, version in self.versions.items():
            if self._sent.get(name) == version:
                continue
            target = self.folder / f"{name}-{version}"
            shutil.rmtree(target, ignore_errors=True)  # an interrupted sync may have left one
            try:
                with self.clock("export_s"):
                    manifest = await asyncio.to_thread(trainer.export_weights, target, adapter=name)
                with self.clock("update_s"):
                    await self.engines.engines[name].update_weights(manifest, version)
            finally:
                shutil.rmtree(target, ignore_errors=True)
            self._sent[name] = version
