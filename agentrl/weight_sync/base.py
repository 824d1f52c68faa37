"""What all ways of bringing weights to engines share: timings, the check afterwards, weights for an engine that comes back, memory in turns."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.engine.base import Engine, WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.supervisor import Failures, failures_of
from agentrl.train.base import Trainer
from agentrl.weight_sync.verify import Expected, compare, expect, probe_ids

MEMORY = Path("/dev/shm")
COPIES = 4
"""of the model's files: a sync's and a recovery's, in twice the bytes (float32 of a model in bfloat16)"""


def memory_for(size: int) -> Path | None:
    """Shared memory, if it has room for weights of a model of so many bytes (in a container it often has 64 MiB)."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > COPIES * size else None


class WeightSync:
    """Carries weights from the trainer to the engine, one version at a time: pause, update, verify, new version, resume."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where folders of weights go; None: the temporary folder."""
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=folder))
        self.seconds: dict[str, float] = {}
        """of the last sync: pause, update, verify, resume"""
        self.difference: float | None = None
        """the largest absolute difference of engine's and trainer's log-probs after the last sync, where it was measured"""
        self.bytes = 0
        """sent in the last sync, where it is known"""
        self.gpu_yielded = False
        """the engine's memory is the trainer's now (colocated)"""
        self._probe: list[int] = [0, 0]
        """ids whose log-probs are compared after a sync"""

    async def sync(self, trainer: Trainer, engine: Engine, policy_version: int) -> None:
        """Bring the trainer's weights to the engine.

        Raises:
            WorkerError, EngineFailure: one side failed; no engine answers with a mixture of versions.
        """
        self.seconds, self.difference, self.bytes = {}, None, 0
        with self.clock("pause_s"):
            await engine.pause()
        try:
            await self.update(trainer, engine, policy_version)
        finally:
            with self.clock("resume_s"):
                await engine.resume()

    async def update(self, trainer: Trainer, engine: Engine, policy_version: int) -> None:
        """The part between pause and resume."""
        raise NotImplementedError

    async def begin(self, trainer: Trainer, engine: Engine) -> None:
        """Both sides have started: see to it that an engine that comes back later gets the weights that count."""
        if isinstance(engine, Fleet):
            engine.recovery = lambda lost: self.recover(trainer, engine, lost)
            self._probe = await probe_ids(engine)

    def metrics(self) -> dict[str, float]:
        """What a run reports of the last sync, besides seconds."""
        return {} if self.difference is None else {"sync/log_prob_diff_max": self.difference}

    def memory(self) -> dict[str, float]:
        """Free memory at the stages of the last cycle, MiB, where engine and trainer share cards."""
        return {}

    async def yield_gpu(self, trainer: Trainer, engine: Engine, *, keep_weights: bool = False) -> None:
        """Give the engine's memory to the trainer, where they share cards. `keep_weights`: the engine's weights stay."""

    async def reclaim_gpu(self, trainer: Trainer, engine: Engine) -> None:
        """Undo `yield_gpu(keep_weights=True)`."""

    async def recover(self, trainer: Trainer, fleet: Fleet, engine: SGLangEngine) -> bool:
        """Bring the weights that count to an engine that lost its own, and check them; False: not now.

        Raises:
            EngineFailure: nothing is known of its weights.
        """
        manifest, expected = await self.current(trainer, fleet)
        await engine.update_weights(manifest, fleet.policy_version)
        failed = await self.verify([engine], expected)
        if failed:
            raise failed[engine.address]
        return True

    async def current(self, trainer: Trainer, fleet: Fleet) -> tuple[WeightsManifest, Expected]:
        """The trainer's weights as a folder, and what an engine says that has them."""
        target = self.folder / "current"
        shutil.rmtree(target, ignore_errors=True)
        return await asyncio.to_thread(trainer.export_weights, target), await self.expected(trainer, fleet)

    async def expected(self, trainer: Any, engine: Fleet) -> Expected:
        """What the engines must say if they have the trainer's weights."""
        with self.clock("verify_s"):
            return await expect(trainer, engine, self._probe)

    async def verify(self, engines: Sequence[SGLangEngine], expected: Expected) -> Failures:
        """The engines that have other weights."""
        with self.clock("verify_s"):
            failed, self.difference = await compare(engines, expected)
        return failed

    def clock(self, name: str) -> Clock:
        """Adds the time of a `with` block to `seconds[name]`."""
        return Clock(self.seconds, name)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Clock:
    """Adds up seconds by name."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._started


async def on_each(
    engines: Sequence[SGLangEngine], failed: Failures, what: Callable[[SGLangEngine], Awaitable[Any]]
) -> None:
    """Do something on all engines that have not failed, at once; failures are added to `failed`."""
    failed.update(await failures_of([e for e in engines if e.address not in failed], what))
