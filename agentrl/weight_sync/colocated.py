"""Weights by handles of memory that trainer and engine both map: CUDA memory of the same GPU, or shared memory on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.engine.base import WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Failures
from agentrl.errors import EngineFailure
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import BUCKET_BYTES, TIMEOUT_S, DeliverySync, healthy, on_healthy, receivers
from agentrl.weight_sync.gpu_sharing import GpuSharing
from agentrl.weight_sync.verify import Expected


class ColocatedSync(DeliverySync):
    """Sync by handles of shared memory, for SGLang servers on the trainer's machine."""

    def __init__(
        self,
        fleet: Fleet,
        folder: Path | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        share_gpus: bool = True,
    ) -> None:
        """`share_gpus`: engine and trainer use the same GPUs, so only one of them has its memory there at a time."""
        super().__init__(fleet, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self.sharing = GpuSharing(fleet) if share_gpus else None

    @property
    def gpu_yielded(self) -> bool:
        return self.sharing is not None and self.sharing.yielded

    async def begin(self, trainer: Trainer) -> None:
        await super().begin(trainer)
        if self.sharing:  # the first rollout has the GPU to itself
            await self.sharing.offload(trainer)
            await self.sharing.note(trainer, "rollout")

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            failed: Failures = {}
            if self.sharing:
                await self.sharing.before_transfer(trainer, engines, failed)
            await on_healthy(engines, failed, lambda e: e.begin_weights(bracket=True))
            with self.clock("update_s"):
                if targets := receivers(healthy(engines, failed)):
                    failed |= await self.deliver(trainer, "tensors", receivers=targets, bucket_bytes=self.bucket_bytes)
            expected = await self.expected(trainer)
            if self.sharing:
                await self.sharing.after_transfer(trainer, engines, failed)
            with self.clock("finish_s"):
                await on_healthy(engines, failed, lambda e: e.end_weights(policy_version))
            return failed | await self.verify(healthy(engines, failed), expected)

        if self.sharing:
            await self.sharing.before_update(trainer)
        await self.fleet.transfer(send, policy_version)
        if self.sharing:
            await self.sharing.after_update()

    def memory(self) -> dict[str, float]:
        free = self.sharing.free_mib if self.sharing else {}
        return {f"free_mib/{stage.replace(' ', '_')}": mib for stage, mib in free.items()}

    async def yield_gpu(self, trainer: Trainer, *, keep_weights: bool = False) -> None:
        if self.sharing:
            await self.sharing.yield_to_trainer(trainer, keep_weights=keep_weights)

    async def reclaim_gpu(self, trainer: Trainer) -> None:
        if self.sharing:
            await self.sharing.return_to_engine(trainer)

    async def recover(self, trainer: Trainer, engine: SGLangEngine) -> bool:
        """See `FleetSync.recover`. While other servers generate on shared GPUs it is impossible; the next sync reaches the engine anyway."""
        if self.sharing and any(m.state == "ready" for m in self.fleet.members):
            return False
        return await super().recover(trainer, engine)

    async def current(self, trainer: Trainer) -> tuple[WeightsManifest, Expected]:
        """See `FleetSync.current`. Shared GPUs belong to the trainer in the meantime."""
        if not self.sharing:
            return await super().current(trainer)
        failed: Failures = {}
        stale = [m.engine for m in self.fleet.members if m.state == "stale"]
        await on_healthy(stale, failed, lambda e: e.sleep())
        await self.sharing.onload(trainer)
        weights = await super().current(trainer)
        await self.sharing.offload(trainer)
        await on_healthy(stale, failed, lambda e: e.wake())
        if failed:
            raise EngineFailure("; ".join(map(str, failed.values())), "engine: memory")
        return weights
