"""Weights through a folder: the trainer writes safetensors, the engine reads them. On one machine the folder is in shared memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from agentrl.engine.base import Engine
from agentrl.train.base import Trainer


class DiskSync:
    """Carries weights from the trainer to the engine, one version at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where to put them; None: shared memory if the machine has it, else the temporary folder."""
        memory = Path("/dev/shm")
        parent = folder or (memory if memory.is_dir() else None)
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=parent))

    async def sync(self, trainer: Trainer, engine: Engine, policy_version: int) -> None:
        """Pause, export, update, check the fingerprint (the engine does), resume with the new version.

        Raises:
            WorkerError, EngineFailure: one side failed; the engine stays at its old version.
        """
        target = self.folder / f"v{policy_version}"
        await engine.pause()
        try:
            manifest = await asyncio.to_thread(trainer.export_weights, target)
            await engine.update_weights(manifest, policy_version)
        finally:
            shutil.rmtree(target, ignore_errors=True)
            await engine.resume()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
