"""GPU memory where trainer and engine share GPUs: at any time one of them has it.

The cycle: the engine sleeps and the trainer loads its memory; after the step the memory of the engine's weights wakes, the weights are
transferred, the trainer offloads, and the engine's cache wakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.engine.sglang.engine import ALL_MEMORY, KEPT_WEIGHTS, SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Failures
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import on_healthy


class GpuSharing:
    """Moves GPU memory between one trainer and one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.yielded = False
        """the engine sleeps and the trainer has its memory"""
        self.free_mib: dict[str, int] = {}
        """free memory of the first GPU at each stage of the last cycle"""
        self._offloaded = False

    async def yield_to_trainer(self, trainer: Trainer, *, keep_weights: bool) -> None:
        """Put the engine to sleep, then load the trainer's memory."""
        if not self.yielded:
            await self.fleet.sleep(weights=not keep_weights)
            self.yielded = True
            await self.note(trainer, "engine asleep")
        await self.onload(trainer)
        await self.note(trainer, "trainer on the card")

    async def return_to_engine(self, trainer: Trainer) -> None:
        """Offload the trainer, then wake the engine, which kept its weights."""
        await self.offload(trainer)
        if self.yielded:
            self.yielded = False
            await self.fleet.wake()

    async def before_update(self, trainer: Trainer) -> None:
        """Make room for servers that must restart because they died while they slept."""
        if self.yielded and all(m.state == "down" for m in self.fleet.members):
            await self.offload(trainer)

    async def before_transfer(self, trainer: Trainer, engines: Sequence[SGLangEngine], failed: Failures) -> None:
        """Load the trainer's memory, and allocate the memory of the engines' weights."""
        if self.yielded:  # a server that came back in the meantime is awake
            await on_healthy(engines, failed, lambda e: e.sleep(ALL_MEMORY))
        await self.onload(trainer)
        if self.yielded:
            await on_healthy(engines, failed, lambda e: e.wake(("weights",), ready=False))

    async def after_transfer(self, trainer: Trainer, engines: Sequence[SGLangEngine], failed: Failures) -> None:
        """Offload the trainer, then wake the engines' caches."""
        await self.note(trainer, "both hold weights")
        await self.offload(trainer)
        if self.yielded:
            await on_healthy(engines, failed, lambda e: e.wake(KEPT_WEIGHTS))
        await self.note(trainer, "rollout")

    async def after_update(self) -> None:
        """Mark the GPUs as the engine's again: all servers are awake."""
        if self.yielded:
            self.yielded = False
            await self.fleet.wake((), ready=True)

    async def note(self, trainer: Trainer, stage: str) -> None:
        """Record the free memory of the first GPU, where it is known."""
        free = await asyncio.to_thread(trainer.free_mib)
        self.free_mib.pop(stage, None)
        if free is not None:
            self.free_mib[stage] = free

    async def onload(self, trainer: Trainer) -> None:
        """Load the trainer's memory if it is offloaded."""
        if self._offloaded:
            await asyncio.to_thread(trainer.onload)
            self._offloaded = False

    async def offload(self, trainer: Trainer) -> None:
        """Free the trainer's GPU memory if it is loaded."""
        if not self._offloaded:
            await asyncio.to_thread(trainer.offload)
            self._offloaded = True
