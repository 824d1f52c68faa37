"""Weight sync: carries the trainer's weights to the engine, one policy version at a time.

`FleetSync` is the base for SGLang servers. It verifies every transfer and restores the weights of a server that comes back.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from agentrl.core.file_lock import is_locked, locked_folder, try_lock
from agentrl.engine.base import Engine, WeightsManifest
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Failures, failures_of
from agentrl.errors import EngineFailure
from agentrl.train.base import Receiver, Trainer
from agentrl.weight_sync.verify import Expected, compare, expected_weights, probe_ids

MEMORY = Path("/dev/shm")
BUCKET_BYTES = 1 << 30
TIMEOUT_S = 300.0
UNLOCKED_S = 3600.0
_PREFIX, _LOCK = "agentrl-weights-", "lock"
COPIES = 4
"""Free shared memory required, in sizes of the model: a sync and a recovery may each write one copy, in float32 of a bfloat16 model."""


def memory_for(size: int) -> Path | None:
    """Shared memory if it has room for the weights of a model of `size` bytes, else None (containers often have only 64 MiB)."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > COPIES * size else None


def new_weights_folder(parent: Path) -> tuple[Path, BinaryIO]:
    """Create a folder for weights, and return it with its open lock file. Those of processes that were killed are removed first.

    A folder belongs to a living process as long as its lock is held. The lock of the parent is held until that is so, because another start could
    remove the folder in between. One without a lock file was left by an older agentrl, which may live; it is removed after `UNLOCKED_S`.
    """
    with locked_folder(parent):
        for other in parent.glob(f"{_PREFIX}*"):
            try:
                lock = other / _LOCK
                status = other.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                    continue
                empty = not any(other.iterdir())
                left = not is_locked(lock) if lock.exists() else empty or time.time() - status.st_mtime > UNLOCKED_S
            except OSError:
                continue  # its process removed it
            if left:
                shutil.rmtree(other, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        file = (new / _LOCK).open("wb")
        try_lock(file)
        return new, file


class WeightSync:
    """Brings the trainer's weights to one engine. A sync is: pause, update, resume."""

    def __init__(self, engine: Engine, folder: Path | None = None) -> None:
        """`folder`: where weight folders are written; None: the system's temporary folder."""
        self.engine = engine
        self.folder, self._lock = new_weights_folder(folder or Path(tempfile.gettempdir()))
        self.seconds: dict[str, float] = {}
        """duration of each part of the last sync"""
        self.difference: float | None = None
        """largest absolute difference between the engine's and the trainer's log-probs after the last sync; None: not measured"""
        self.bytes = 0
        """bytes sent in the last sync; 0 where weights go through a folder"""

    @property
    def gpu_yielded(self) -> bool:
        """Whether the engine sleeps because the trainer has its GPU memory."""
        return False

    async def begin(self, trainer: Trainer) -> None:
        """Prepare for the first rollout; called once, after trainer and engine have started."""

    async def sync(self, trainer: Trainer, policy_version: int) -> None:
        """Bring the trainer's weights to the engine, which serves `policy_version` afterwards.

        Raises:
            WorkerError, EngineFailure: one side failed. No engine continues with a mixture of versions.
        """
        self.seconds, self.difference, self.bytes = {}, None, 0
        with self.clock("pause_s"):
            await self.engine.pause()
        try:
            await self.update(trainer, policy_version)
        finally:
            with self.clock("resume_s"):
                await self.engine.resume()

    async def update(self, trainer: Trainer, policy_version: int) -> None:
        """The part of a sync between pause and resume."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Metrics of the last sync other than durations."""
        return {} if self.difference is None else {"sync/log_prob_diff_max": self.difference}

    def memory(self) -> dict[str, float]:
        """Free GPU memory in MiB at each stage of the last cycle, where engine and trainer share GPUs."""
        return {}

    async def yield_gpu(self, trainer: Trainer, *, keep_weights: bool = False) -> None:
        """Give the engine's GPU memory to the trainer where they share GPUs. `keep_weights`: the engine keeps its weights in memory."""

    async def reclaim_gpu(self, trainer: Trainer) -> None:
        """Undo `yield_gpu(keep_weights=True)`."""

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the duration of the `with` block to `seconds[name]`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


class FleetSync(WeightSync):
    """Brings weights to SGLang servers and verifies that each of them has the trainer's."""

    def __init__(self, fleet: Fleet, folder: Path | None = None) -> None:
        super().__init__(fleet, folder)
        self.fleet = fleet
        self._probe: list[int] = [0, 0]

    async def begin(self, trainer: Trainer) -> None:
        """Restore the weights of servers that come back from now on, and choose the token ids that verify a sync."""
        self.fleet.recovery = lambda engine: self.recover(trainer, engine)
        self.fleet.grows = True
        self._probe = await probe_ids(self.fleet)

    async def recover(self, trainer: Trainer, engine: SGLangEngine) -> bool:
        """Bring the current weights to an engine that lost its own, and verify them; False: impossible at the moment.

        Raises:
            EngineFailure: the engine may hold any weights.
        """
        manifest, expected = await self.current(trainer)
        await engine.update_weights(manifest, self.fleet.policy_version)
        failed = await self.verify([engine], expected)
        if failed:
            raise failed[engine.address]
        return True

    async def current(self, trainer: Trainer) -> tuple[WeightsManifest, Expected]:
        """The trainer's weights as a folder, and what verifies them."""
        target = self.folder / "current"
        shutil.rmtree(target, ignore_errors=True)
        return await asyncio.to_thread(trainer.export_weights, target), await self.expected(trainer)

    async def expected(self, trainer: Trainer) -> Expected:
        """What an engine with the trainer's weights must return."""
        with self.clock("verify_s"):
            return await expected_weights(trainer, self.fleet, self._probe)

    async def verify(self, engines: Sequence[SGLangEngine], expected: Expected) -> Failures:
        """Failures of the engines whose weights are not the expected ones."""
        with self.clock("verify_s"):
            failed, self.difference = await compare(engines, expected)
        return failed


class DeliverySync(FleetSync):
    """Brings weights from the trainer's ranks directly to the servers."""

    def __init__(
        self,
        fleet: Fleet,
        folder: Path | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`bucket_bytes`: size of the buckets that tensors are packed into; `timeout_s`: limit for each request to a server."""
        super().__init__(fleet, folder)
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s

    async def deliver(self, trainer: Trainer, action: str, **arguments: Any) -> Failures:
        """Run a delivery (see `Trainer.deliver`); returns the servers that failed."""
        reports = await asyncio.to_thread(trainer.deliver, action, timeout_s=self.timeout_s, **arguments)
        failed: Failures = {}
        slowest = 0.0
        for report in reports:
            self.bytes += report.bytes
            slowest = max(slowest, report.seconds)
            for address, reason in report.failed.items():
                separator = "" if reason.startswith("/") else ": "  # a path continues the address
                failed[address] = EngineFailure(f"{address}{separator}{reason}", "engine: weight transfer")
        self.seconds["send_s"] = self.seconds.get("send_s", 0.0) + slowest
        return failed


def receivers(engines: Sequence[SGLangEngine]) -> list[Receiver]:
    """The engines as the trainer's ranks address them."""
    return [Receiver(e.address, e.api.facts.tp_size) for e in engines]


def healthy(engines: Sequence[SGLangEngine], failed: Failures) -> list[SGLangEngine]:
    """The engines that have not failed."""
    return [e for e in engines if e.address not in failed]


async def on_healthy(
    engines: Sequence[SGLangEngine], failed: Failures, command: Callable[[SGLangEngine], Awaitable[Any]]
) -> None:
    """Run `command` concurrently on the engines that have not failed; failures are added to `failed`."""
    failed.update(await failures_of(healthy(engines, failed), command))
