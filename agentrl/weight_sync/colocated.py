"""Weights by handles of memory that trainer and engine share: CUDA memory of the same card, or shared memory on a CPU.

The cycle on one card: the engine sleeps and its memory is the trainer's; after the step its weights' memory wakes, the weights go over in
flattened buckets, the trainer leaves the card, and the engine's cache wakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.engine.base import Engine, WeightsManifest
from agentrl.engine.sglang.engine import ALL_MEMORY, KEPT_WEIGHTS, SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.supervisor import Failures
from agentrl.errors import ConfigError, EngineFailure
from agentrl.train.base import Trainer
from agentrl.train.megatron.delivery.messages import Target
from agentrl.weight_sync.base import WeightSync, on_each
from agentrl.weight_sync.verify import Expected

BUCKET_BYTES = 1 << 30


class ColocatedSync(WeightSync):
    """For SGLang servers on the trainer's machine."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 300.0,
        memory_in_turns: bool = True,
    ) -> None:
        """`memory_in_turns`: engine and trainer share cards, so only one of them has its memory at a time."""
        super().__init__(folder)
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._in_turns = memory_in_turns
        self._offloaded = False
        self.free_mib: dict[str, int] = {}
        """free memory of the first card at each stage of the last cycle"""

    def memory(self) -> dict[str, float]:
        """See `WeightSync.memory`: the free memory of the first card at each stage of the last cycle."""
        return {f"free_mib/{k.replace(' ', '_')}": v for k, v in self.free_mib.items()}

    async def update(self, trainer: Any, engine: Engine, policy_version: int) -> None:
        """Wake the weights' memory, send, leave the card, wake the rest, verify."""
        fleet = require_fleet(engine)

        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            failed: Failures = {}
            if self.gpu_yielded:  # one that came back meanwhile is awake
                await on_each(engines, failed, lambda e: e.sleep(ALL_MEMORY))
            await self._onload(trainer)
            if self.gpu_yielded:
                await on_each(engines, failed, lambda e: e.wake(("weights",), ready=False))
            await on_each(engines, failed, lambda e: e.begin_weights(bracket=True))
            with self.clock("update_s"):
                failed |= await self.deliver(trainer, "tensors", [e for e in engines if e.address not in failed])
            expected = await self.expected(trainer, fleet)
            await self._note(trainer, "both hold weights")
            await self._offload(trainer)
            if self.gpu_yielded:
                await on_each(engines, failed, lambda e: e.wake(KEPT_WEIGHTS))
            await self._note(trainer, "rollout")
            with self.clock("finish_s"):
                await on_each(engines, failed, lambda e: e.end_weights(policy_version))
            return failed | await self.verify([e for e in engines if e.address not in failed], expected)

        if self.gpu_yielded and all(m.state == "down" for m in fleet.members):
            await self._offload(trainer)  # room for those that died in their sleep
        await fleet.transfer(send, policy_version)
        if self.gpu_yielded:
            self.gpu_yielded = False
            await fleet.wake((), ready=True)

    async def deliver(self, trainer: Any, action: str, engines: Sequence[SGLangEngine]) -> Failures:
        """Have the trainer's ranks send; what failed."""
        if not engines:
            return {}
        answers = await asyncio.to_thread(
            trainer.deliver,
            action,
            targets=[Target(e.address, e.facts.tp_size) for e in engines],
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.timeout_s,
        )
        return self.tally(answers)

    def tally(self, answers: Sequence[Any]) -> Failures:
        """Add up what the stages sent; what failed."""
        self.bytes += sum(a.bytes for a in answers)
        self.seconds["send_s"] = self.seconds.get("send_s", 0.0) + max((a.seconds for a in answers), default=0.0)
        return {
            address: EngineFailure(f"{address}{why}", "engine: weight transfer")
            for a in answers
            for address, why in a.failed.items()
        }

    async def begin(self, trainer: Trainer, engine: Engine) -> None:
        """See `WeightSync.begin`; the first rollout has the card to itself."""
        await super().begin(trainer, engine)
        await self._offload(trainer)
        await self._note(trainer, "rollout")

    async def yield_gpu(self, trainer: Trainer, engine: Engine, *, keep_weights: bool = False) -> None:
        """The engine sleeps, the trainer comes onto the card."""
        if self._in_turns and not self.gpu_yielded:
            await require_fleet(engine).sleep(weights=not keep_weights)
            self.gpu_yielded = True
            await self._note(trainer, "engine asleep")
        await self._onload(trainer)
        await self._note(trainer, "trainer on the card")

    async def reclaim_gpu(self, trainer: Trainer, engine: Engine) -> None:
        """The trainer leaves the card, the engine wakes with the weights that it kept."""
        await self._offload(trainer)
        if self.gpu_yielded:
            self.gpu_yielded = False
            await require_fleet(engine).wake()

    async def recover(self, trainer: Trainer, fleet: Fleet, engine: SGLangEngine) -> bool:
        """See `WeightSync.recover`; not while others play on the trainer's cards: the next sync comes to it anyway."""
        if self._in_turns and any(m.state == "ready" for m in fleet.members):
            return False
        return await super().recover(trainer, fleet, engine)

    async def current(self, trainer: Trainer, fleet: Fleet) -> tuple[WeightsManifest, Expected]:
        """See `WeightSync.current`; the cards are the trainer's meanwhile."""
        if not self._in_turns:
            return await super().current(trainer, fleet)
        failed: Failures = {}
        up = [m.engine for m in fleet.members if m.state == "stale"]
        await on_each(up, failed, lambda e: e.sleep())
        await self._onload(trainer)
        found = await super().current(trainer, fleet)
        await self._offload(trainer)
        await on_each(up, failed, lambda e: e.wake())
        if failed:
            raise EngineFailure("; ".join(map(str, failed.values())), "engine: memory")
        return found

    async def _note(self, trainer: Trainer, stage: str) -> None:
        """Note the free memory of the first card, if it can be told."""
        free = await asyncio.to_thread(trainer.free_mib) if self._in_turns else None
        self.free_mib.pop(stage, None)
        if free is not None:
            self.free_mib[stage] = free

    async def _onload(self, trainer: Trainer) -> None:
        if self._offloaded:
            await asyncio.to_thread(trainer.onload)
            self._offloaded = False

    async def _offload(self, trainer: Trainer) -> None:
        if self._in_turns and not self._offloaded:
            await asyncio.to_thread(trainer.offload)
            self._offloaded = True


def require_fleet(engine: Engine) -> Fleet:
    """The engine as a fleet of SGLang servers.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(engine, Fleet):
        raise ConfigError(
            "--weight-sync colocated and split need --engine sglang; the local engine takes weights by disk"
        )
    return engine
