"""Weights by broadcast: one group per pipeline stage, of the stage's first rank and all ranks of all engines, over NCCL or (CPU) gloo.

The groups live as long as the same engines do. When one is lost, the groups are closed on all sides and formed anew with those that are left;
a server that did not hear of it in time is discarded by the fleet, since its scheduler waits in the old group.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.core.ports import free_port
from agentrl.engine.base import Engine
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.supervisor import Failures
from agentrl.errors import EngineFailure
from agentrl.train.megatron.delivery.messages import Target
from agentrl.weight_sync.base import on_each
from agentrl.weight_sync.colocated import BUCKET_BYTES, ColocatedSync, require_fleet


class SplitSync(ColocatedSync):
    """For SGLang servers on cards of their own."""

    def __init__(
        self, folder: Path | None = None, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = 300.0
    ) -> None:
        super().__init__(folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s, memory_in_turns=False)
        self._name = ""
        self._members: tuple[tuple[str, int], ...] = ()

    async def update(self, trainer: Any, engine: Engine, policy_version: int) -> None:
        """Form the groups if the engines are others than before, broadcast, verify."""
        fleet = require_fleet(engine)
        expected = await self.expected(trainer, fleet)

        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            failed: Failures = {}
            with self.clock("group_s"):
                failed |= await self._join(trainer, engines)
            if failed:
                return _all_failed(engines, failed, "the group was not formed", "engine: weight group")
            await on_each(engines, failed, lambda e: e.begin_weights(bracket=True))
            if failed:
                self._members = ()
                return _all_failed(engines, failed, "another engine failed", "engine: weight group")
            with self.clock("update_s"):
                failed |= await self._broadcast(trainer)
            if failed:  # the others may lack what was sent last: all are discarded
                self._members = ()
                return _all_failed(engines, failed, "another engine of the group failed", "engine: weight transfer")
            with self.clock("finish_s"):
                await on_each(engines, failed, lambda e: e.end_weights(policy_version))
            return failed | await self.verify([e for e in engines if e.address not in failed], expected)

        await fleet.transfer(send, policy_version)

    async def _join(self, trainer: Any, engines: Sequence[SGLangEngine]) -> Failures:
        """Groups of exactly these engines; what failed."""
        members = tuple((e.address, e.started) for e in engines)
        if members == self._members:
            return {}
        stages = max(p["pp"] for p in trainer.places) + 1
        if self._name:
            await asyncio.gather(*(self._leave(e, s) for e in engines for s in range(stages)))
        self._name, self._members = f"agentrl-{uuid.uuid4().hex[:8]}", ()
        answers = await asyncio.to_thread(
            trainer.deliver,
            "open_group",
            targets=[Target(e.address, e.facts.tp_size) for e in engines],
            ports=[free_port() for _ in range(stages)],
            name=self._name,
            backend="gloo" if engines[0].facts.device == "cpu" else "nccl",
            timeout_s=self.timeout_s,
        )
        failed = self.tally(answers)
        if not failed:
            self._members = members
        return failed

    async def _leave(self, engine: SGLangEngine, stage: int) -> None:
        """Have a server leave the group of a stage, if it is in it."""
        try:
            await engine.http.post(
                "/destroy_weights_update_group", {"group_name": f"{self._name}-{stage}"}, timeout_s=self.timeout_s
            )
        except EngineFailure:
            return  # it was restarted and is in none

    async def _broadcast(self, trainer: Any) -> Failures:
        answers = await asyncio.to_thread(
            trainer.deliver, "broadcast", bucket_bytes=self.bucket_bytes, timeout_s=self.timeout_s
        )
        return self.tally(answers)


def _all_failed(engines: Sequence[SGLangEngine], failed: Failures, why: str, cause: str) -> Failures:
    """Those that failed, and the others of the group with them."""
    return {e.address: EngineFailure(f"{e.address}: {why}", cause) for e in engines} | failed
