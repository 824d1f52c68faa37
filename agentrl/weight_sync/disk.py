"""Weights through a folder: the trainer writes safetensors, the engine reads them. On one machine the folder is in shared memory."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentrl.engine.base import WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.members import Failures
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import FleetSync, WeightSync, healthy, on_healthy


@asynccontextmanager
async def exported_weights(sync: WeightSync, trainer: Trainer, policy_version: int) -> AsyncIterator[WeightsManifest]:
    """The trainer's weights as a folder that exists during the `with` block."""
    target = sync.folder / f"v{policy_version}"
    shutil.rmtree(target, ignore_errors=True)  # an interrupted run may have left one
    try:
        with sync.clock("export_s"):
            manifest = await asyncio.to_thread(trainer.export_weights, target)
        yield manifest
    finally:
        shutil.rmtree(target, ignore_errors=True)


class LocalDiskSync(WeightSync):
    """Sync by a folder, for an engine in this process. The engine verifies the folder's fingerprint before it loads the weights."""

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        async with exported_weights(self, trainer, policy_version) as manifest:
            with self.clock("update_s"):
                await self.engine.update_weights(manifest, policy_version)


class DiskSync(FleetSync):
    """Sync by a folder that the SGLang servers can read, on this machine or another."""

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        async with exported_weights(self, trainer, policy_version) as manifest:
            expected = await self.expected(trainer)

            async def send(engines: Sequence[SGLangEngine]) -> Failures:
                failed: Failures = {}
                with self.clock("update_s"):
                    await on_healthy(engines, failed, lambda e: e.update_weights(manifest, policy_version))
                return failed | await self.verify(healthy(engines, failed), expected)

            await self.fleet.transfer(send, policy_version)
