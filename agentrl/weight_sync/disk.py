"""Weights through a folder: the trainer writes safetensors, the engine reads them. On one machine the folder is in shared memory."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence

from agentrl.engine.base import Engine
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.supervisor import Failures
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import WeightSync, on_each


class DiskSync(WeightSync):
    """For any engine that can read the folder; the fingerprint of what was written is checked before it is read."""

    async def update(self, trainer: Trainer, engine: Engine, policy_version: int) -> None:
        """Export, have the engine read, remove."""
        target = self.folder / f"v{policy_version}"
        shutil.rmtree(target, ignore_errors=True)  # of a run that broke off
        try:
            with self.clock("export_s"):
                manifest = await asyncio.to_thread(trainer.export_weights, target)
            if not isinstance(engine, Fleet):
                with self.clock("update_s"):
                    await engine.update_weights(manifest, policy_version)
                return
            expected = await self.expected(trainer, engine)

            async def send(engines: Sequence[SGLangEngine]) -> Failures:
                failed: Failures = {}
                with self.clock("update_s"):
                    await on_each(engines, failed, lambda e: e.update_weights(manifest, policy_version))
                return failed | await self.verify([e for e in engines if e.address not in failed], expected)

            await engine.transfer(send, policy_version)
        finally:
            shutil.rmtree(target, ignore_errors=True)
