"""Several adapters to an engine: those that a step changed, each with its own version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.engine.local.adapter_engines import AdapterEngines
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Failures
from agentrl.errors import EngineFailure
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import FleetSync, WeightSync, healthy, on_healthy
from agentrl.weight_sync.verify import Expected, compare, expected_weights


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


class FleetAdapterSync(FleetSync):
    """Adapters to SGLang servers, which keep the base: as folders of peft that they can read.

    Each server's log-probs with each adapter are compared with the trainer's. A server that comes back is given the last versions.

    Args:
        fleet: of servers that take adapters.
        versions: the current version of each adapter, which the owner changes.
        folder: see `WeightSync`.
    """

    def __init__(self, fleet: Fleet, versions: Mapping[str, int], folder: Path | None = None) -> None:
        super().__init__(fleet, folder)
        self.versions = versions
        self._folders: dict[str, tuple[int, Path]] = {}
        """version and folder of the adapters of the last sync"""
        self._expected: dict[str, Expected] = {}

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        """See `WeightSync.update`; adapters that have not changed since the last sync are left out."""
        for name, version in self.versions.items():
            if self._folders.get(name, (None,))[0] != version:
                await self._export(trainer, name, version)

        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            failed: Failures = {}
            with self.clock("update_s"):
                await on_healthy(engines, failed, lambda engine: self._load(engine, policy_version))
            return failed | await self._verify_all(healthy(engines, failed))

        await self.fleet.transfer(send, policy_version)

    async def recover(self, trainer: Trainer, engine: SGLangEngine) -> bool:
        """See `FleetSync.recover`; False before the first sync."""
        if not self._folders:
            return False
        await self._load(engine, self.fleet.policy_version)
        failed = await self._verify_all([engine])
        if failed:
            raise failed[engine.address]
        return True

    async def _export(self, trainer: Trainer, name: str, version: int) -> None:
        """Write an adapter, in the place of its former version."""
        target = self.folder / f"{name}-{version}"
        shutil.rmtree(target, ignore_errors=True)  # an interrupted sync may have left one
        with self.clock("export_s"):
            await asyncio.to_thread(trainer.export_adapter, target, adapter=name)
        with self.clock("verify_s"):
            self._expected[name] = await expected_weights(trainer, self.fleet, self._probe, adapter=name)
        if (former := self._folders.get(name)) is not None and former[1] != target:
            shutil.rmtree(former[1], ignore_errors=True)
        self._folders[name] = version, target

    async def _load(self, engine: SGLangEngine, policy_version: int) -> None:
        """Load what the server lacks."""
        has = {name: loaded.version for name, loaded in engine.adapters.current.items()}
        new = {name: place for name, place in self._folders.items() if has.get(name) != place[0]}
        await engine.load_adapters(new, policy_version)

    async def _verify_all(self, engines: Sequence[SGLangEngine]) -> Failures:
        """Failures of the engines of which an adapter is not the trainer's."""
        failed: Failures = {}
        self.difference = None
        with self.clock("verify_s"):
            for name, expected in self._expected.items():
                wrong, difference = await compare(healthy(engines, failed), expected, adapter=name)
                failed |= wrong
                self.difference = max((d for d in (self.difference, difference) if d is not None), default=None)
        for engine in engines:
            if (failure := failed.get(engine.address)) is not None:
                failed[engine.address] = await _without_adapters(engine, failure)
        return failed


async def _without_adapters(engine: SGLangEngine, failure: EngineFailure) -> EngineFailure:
    """Unload the adapters of a server that failed, so that they are sent again; the failure with what became of them."""
    left = await engine.adapters.discard(engine.api)
    fate = f"it still has {', '.join(left)}, which the next load unloads" if left else "its adapters were unloaded"
    return EngineFailure(f"{failure}; {fate}", failure.cause)
