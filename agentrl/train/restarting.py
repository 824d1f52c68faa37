"""A trainer that continues when its ranks die, hang or raise (`--use-fault-tolerance`).

The ranks are started again, they load the last checkpoint, and the optimizer steps since are taken again from a journal. These are the same steps
from the same state, so the weights are those of a run without the failure. Then the command that failed is sent again. No torch in this module.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

from agentrl.engine.base import WeightsManifest
from agentrl.errors import NonFiniteError, WorkerError
from agentrl.train.base import Critic, DeliveryReport, Floats, LossConfig, Row, Trainer

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RESTARTS = 3
"""restarts for one command; if it fails once more, the run ends"""
BACKOFF_S = 2.0
"""pause before the second restart for a command; it doubles with each further one"""


class Ranks(Trainer, Critic, Protocol):
    """A trainer or a critic: `MegatronTrainer` is both."""


class Step(NamedTuple):
    """An optimizer step as it is taken again."""

    rows: Sequence[Row]
    loss: LossConfig
    lr: float
    grad_norm: float | None
    """of the first time"""
    options: Mapping[str, Any]
    """the adapter that it trained, if there are several"""


class Journal:
    """The optimizer steps since the last checkpoint, in a file without a name: it goes with the process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed with the trainer
        self.steps = 0
        self._end = 0
        """where the next step is written; a reader may have stopped anywhere"""

    def append(self, step: Step) -> None:
        """Add a step that was taken."""
        self._file.seek(self._end)
        pickle.dump(step, self._file, protocol=5)
        self._end = self._file.tell()
        self.steps += 1

    def __iter__(self) -> Iterator[Step]:
        self._file.seek(0)
        for _ in range(self.steps):
            yield pickle.load(self._file)

    def clear(self) -> None:
        """Forget the steps: a checkpoint holds them."""
        self._file.seek(0)
        self._file.truncate()
        self.steps = self._end = 0

    def close(self) -> None:
        self._file.close()


class RestartingTrainer:
    """A trainer or critic behind the `Trainer` and `Critic` protocols whose ranks are replaced after a failure.

    Args:
        start: starts the ranks with the weights of the model folder.
        folder: where the journal is.
        max_restarts: restarts for one command.
        backoff_s: pause before the second of them.
    """

    def __init__(
        self,
        start: Callable[[], Ranks],
        folder: Path,
        *,
        max_restarts: int = MAX_RESTARTS,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self._start = start
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self._lock = threading.RLock()
        """one command at a time, restarts included"""
        self._closed = threading.Event()
        self._checkpoint: Path | None = None
        """what the ranks load after a restart; None: the model folder is the last state that was saved"""
        self._offloaded = False
        self._receivers: list[str] = []
        """addresses of the servers of the last group"""
        self.restarts = 0
        """how often the ranks were started again"""
        self._journal = Journal(folder)
        self._ranks: Ranks | None = start()
        self._describe(self._ranks)

    def _describe(self, ranks: Ranks) -> None:
        """Take over the attributes of the protocol; on fewer nodes there are fewer copies."""
        self.dtype, self.copies, self.stages = ranks.dtype, ranks.copies, ranks.stages
        self.micro_batch_tokens, self.micro_batch_rows = ranks.micro_batch_tokens, ranks.micro_batch_rows
        self.multiple, self.tree_packing = ranks.multiple, ranks.tree_packing
        self.adapters = ranks.adapters

    # -- failures ------------------------------------------------------------------------------------------------------

    def _command(self, call: Callable[[Ranks], T]) -> T:
        """The result of a command. After a failure the ranks are restored and it is sent again.

        Raises:
            WorkerError: it failed after every restart, or the trainer was closed.
        """
        with self._lock:
            for attempt in range(self._max_restarts + 1):
                try:
                    return call(self._restored(attempt))
                except WorkerError as e:
                    self._discard(e, attempt)
        raise AssertionError("the last attempt raises")

    def _discard(self, error: WorkerError, attempt: int) -> None:
        """Stop what is left of the ranks.

        Raises:
            WorkerError: there is no further attempt.
        """
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        if self._closed.is_set():
            raise error
        if attempt == self._max_restarts:
            raise WorkerError(
                f"the trainer was started again {attempt} times for one command and failed each time; the last: {error}"
            )
        reason = str(error).partition("\n")[0].rstrip(":")  # without the end of the log
        logger.warning("the trainer's ranks are started again, since %s", reason)

    def _restored(self, attempt: int) -> Ranks:
        """The ranks; new ones in the state of those that failed, if they did."""
        if self._ranks is not None:
            return self._ranks
        if attempt > 1:
            self._closed.wait(self._backoff_s * 2 ** (attempt - 2))
        if self._closed.is_set():
            raise WorkerError("the trainer was closed")
        self.restarts += 1
        ranks = self._ranks = self._start()
        try:
            self._restore(ranks)
        except BaseException:  # half restored
            ranks.close()
            self._ranks = None
            raise
        self._describe(ranks)
        return ranks

    def _restore(self, ranks: Ranks) -> None:
        """Bring new ranks into the state of those that failed."""
        if self._closed.is_set():  # nobody else closes these
            raise WorkerError("the trainer was closed")
        if self._checkpoint is not None:
            ranks.load(self._checkpoint)
        for number, step in enumerate(self._journal, 1):
            try:
                repeated = ranks.step(step.rows, step.loss, step.lr, **step.options)["grad_norm"]
            except NonFiniteError as e:
                raise WorkerError(
                    f"optimizer step {number} since the checkpoint was finite, and is not now that it is repeated: {e}"
                ) from e
            if repeated != step.grad_norm:
                logger.warning(
                    "optimizer step %d since the checkpoint had a gradient norm of %s, and has %s now that it is repeated: the trainer is not "
                    "deterministic, and the weights differ from those of a run without the failure",
                    number,
                    step.grad_norm,
                    repeated,
                )
        if self._offloaded:
            ranks.offload()
        start = self._checkpoint or "the model"
        logger.warning("the trainer continues from %s and %d repeated optimizer steps", start, self._journal.steps)

    def restart_from(self, checkpoint: Path) -> None:
        """Restarts load this folder, which holds what the last `save` wrote. The steps before it are forgotten."""
        with self._lock:
            self._checkpoint = checkpoint
            self._journal.clear()

    # -- commands ------------------------------------------------------------------------------------------------------

    def log_probs(
        self,
        rows: Sequence[Row],
        *,
        reference: bool = False,
        trained_only: bool = False,
        adapter: str | None = None,
    ) -> list[Floats]:
        """See `Trainer.log_probs`."""
        options: dict[str, Any] = {"reference": reference, "trained_only": trained_only}
        return self._command(lambda ranks: ranks.log_probs(rows, **options, **_of(adapter)))

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """See `Critic.values`."""
        return self._command(lambda ranks: ranks.values(rows))

    def step(
        self,
        rows: Sequence[Row],
        loss: LossConfig,
        lr: float,
        *,
        profile: Path | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """See `Trainer.step`. A step that is not finite changes nothing and is not repeated."""
        options: dict[str, Any] = {} if profile is None else {"profile": profile}
        with self._lock:
            metrics = self._command(lambda ranks: ranks.step(rows, loss, lr, **options, **_of(adapter)))
            self._journal.append(Step(rows, loss, lr, metrics["grad_norm"], _of(adapter)))
        return metrics

    def deliver(self, action: str, **arguments: Any) -> list[Any]:
        """See `Trainer.deliver`. A group of ranks and servers does not outlive a rank: then all its servers have failed."""
        with self._lock:
            if action == "open_group":
                self._receivers = [receiver.address for receiver in arguments["receivers"]]
            before = self.restarts

            def send(ranks: Ranks) -> list[Any]:
                if action in ("open_group", "broadcast") and self.restarts > before:
                    return [DeliveryReport(failed=dict.fromkeys(self._receivers, "a trainer rank died in the group"))]
                return ranks.deliver(action, **arguments)

            return self._command(send)

    def export_weights(self, path: Path, *, adapter: str | None = None) -> WeightsManifest:
        """See `Trainer.export_weights`."""
        return self._command(lambda ranks: ranks.export_weights(path, **_of(adapter)))

    def export_adapter(self, path: Path, *, adapter: str | None = None) -> None:
        """See `Trainer.export_adapter`."""
        self._command(lambda ranks: ranks.export_adapter(path, **_of(adapter)))

    def save(self, path: Path) -> None:
        """See `Trainer.save`."""
        self._command(lambda ranks: ranks.save(path))

    def begin_save(self, path: Path) -> Callable[[], None]:
        """See `Trainer.begin_save`. No step may be taken before it is complete; if the ranks fail until then, it is written again."""
        steps = self._journal.steps
        with self._lock:
            complete = self._command(lambda ranks: _begin(ranks, path))
            started = self.restarts

        def finish(ranks: Ranks) -> None:
            if self._journal.steps != steps:
                raise AssertionError("an optimizer step was taken before the checkpoint was complete")
            (complete if self.restarts == started else _begin(ranks, path))()

        return lambda: self._command(finish)

    def load(self, path: Path) -> None:
        """See `Trainer.load`."""
        with self._lock:
            self._command(lambda ranks: ranks.load(path))
            self.restart_from(path)

    def offload(self) -> None:
        """See `Trainer.offload`."""
        with self._lock:
            self._command(lambda ranks: ranks.offload())
            self._offloaded = True

    def onload(self) -> None:
        """See `Trainer.onload`."""
        with self._lock:
            self._offloaded = False
            self._command(lambda ranks: ranks.onload())

    def free_mib(self) -> int | None:
        """See `Trainer.free_mib`; None while the ranks are dead, which the next command finds out."""
        with self._lock:
            try:
                return None if self._ranks is None else self._ranks.free_mib()
            except WorkerError as e:
                self._discard(e, 0)
                return None

    def close(self) -> None:
        """See `Trainer.close`. It does not wait for a command: that fails, since its ranks end."""
        self._closed.set()
        ranks = self._ranks
        if ranks is not None:
            ranks.close()
        with self._lock:
            self._journal.close()


def _of(adapter: str | None) -> dict[str, Any]:
    return {} if adapter is None else {"adapter": adapter}


def _begin(ranks: Ranks, path: Path) -> Callable[[], None]:
    """Start to write a checkpoint, in place of one that was begun before."""
    shutil.rmtree(path, ignore_errors=True)
    return ranks.begin_save(path)
