"""Weights by broadcast over NCCL (on a CPU: gloo): one process group per pipeline stage, of the stage's first rank and all ranks of all servers.

The groups stay as long as the same servers do. When a server is lost, the groups are closed on all sides and formed again with the remaining
servers. A server that does not learn of it in time is discarded by the fleet, since its scheduler still waits in the old group.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from agentrl.core.ports import free_port
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.members import Failures
from agentrl.errors import EngineFailure
from agentrl.train.base import Trainer
from agentrl.weight_sync.base import DeliverySync, healthy, on_healthy, receivers


class BroadcastSync(DeliverySync):
    """Sync by broadcast, for SGLang servers on separate GPUs."""

    _group = ""
    """name of the groups; empty: none was formed yet"""
    _members: tuple[tuple[str, int], ...] = ()
    """address and start count of the servers in the groups"""
    _restarts = 0
    """of the trainer, when the groups were formed"""

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        expected = await self.expected(trainer)

        async def send(engines: Sequence[SGLangEngine]) -> Failures:
            failed: Failures = {}
            with self.clock("group_s"):
                failed |= await self._form_groups(trainer, engines)
            if failed:
                return _all_failed(engines, failed, "the group was not formed", "engine: weight group")
            await on_healthy(engines, failed, lambda e: e.begin_weights(bracket=True))
            if failed:
                self._members = ()
                return _all_failed(engines, failed, "another engine failed", "engine: weight group")
            with self.clock("update_s"):
                failed |= await self.deliver(trainer, "broadcast", bucket_bytes=self.bucket_bytes)
            if failed:  # the other servers may lack the last tensors, so all of them are discarded
                self._members = ()
                return _all_failed(engines, failed, "another engine of the group failed", "engine: weight transfer")
            with self.clock("finish_s"):
                await on_healthy(engines, failed, lambda e: e.end_weights(policy_version))
            return failed | await self.verify(healthy(engines, failed), expected)

        await self.fleet.transfer(send, policy_version)

    async def _form_groups(self, trainer: Trainer, engines: Sequence[SGLangEngine]) -> Failures:
        """Make the groups consist of exactly these engines; returns the servers that failed."""
        members = tuple((e.address, e.starts) for e in engines)
        if members == self._members and trainer.restarts == self._restarts:
            return {}
        if self._group:
            await asyncio.gather(*(self._leave(e, s) for e in engines for s in range(trainer.stages)))
        self._group, self._members = f"agentrl-{uuid.uuid4().hex[:8]}", ()
        failed = await self.deliver(
            trainer,
            "open_group",
            receivers=receivers(engines),
            ports=[free_port() for _ in range(trainer.stages)],
            name=self._group,
            backend="gloo" if engines[0].api.facts.device == "cpu" else "nccl",
        )
        if not failed:
            self._members, self._restarts = members, trainer.restarts
        return failed

    async def _leave(self, engine: SGLangEngine, stage: int) -> None:
        """Make a server leave the group of a pipeline stage if it is a member."""
        body = {"group_name": f"{self._group}-{stage}"}
        try:
            await engine.api.command("/destroy_weights_update_group", body)
        except EngineFailure:
            return  # it was restarted and is not a member


def _all_failed(engines: Sequence[SGLangEngine], failed: Failures, reason: str, cause: str) -> Failures:
    """The failures, and one for each other engine: no member of a broken group can be used."""
    return {e.address: EngineFailure(f"{e.address}: {reason}", cause) for e in engines} | failed
