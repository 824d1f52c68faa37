"""The local engine: a causal language model of transformers in this process, for CPUs and small models.

What it promises: the same calls of a session, with the same ids, sampling parameters and seeds, get the same ids and log-probs bit
for bit, whatever else runs (see `local_kv` for how). The forward runs in a thread of its own; a fault there fails every waiting
request and every later call. What it is not: fast on large models; use SGLang for those.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import EngineInfo, Generation, SamplingParams, WeightsManifest, check_request
from agentrl.engine.local.model import LocalModel
from agentrl.engine.local.scheduler import Request, Scheduler
from agentrl.engine.sampling import Decode, StopFinder
from agentrl.errors import AgentRLError, ConfigError, EngineAbort, EngineFailure

T = TypeVar("T")
GRACE_S = 0.01
"""before an idle session is put out of its slot"""
_CLOSED = "the local engine is closed"


class LocalEngine:
    """An `Engine` in this process.

    Args:
        model_dir: a Hugging Face model folder.
        decode: ids -> text, for stop strings; without it they are refused.
        max_running: slots, that is sessions that hold keys and values (see `local_scheduler`).
        context_length: most tokens of context and generation; None: what the model's config says.
        threads: of torch in the engine's thread; None: torch's own choice.
        policy_version: of the weights in `model_dir`.
        timeout_s: how long a call other than `generate` may take; a step in progress is waited for.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        decode: Decode | None = None,
        max_running: int = 64,
        context_length: int | None = None,
        threads: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        policy_version: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1; found {max_running}")
        self._model_dir = Path(model_dir)
        self._decode = decode
        self._max_running = max_running
        self._context_length = context_length
        self._threads = threads
        self._dtype = dtype
        self._device = torch.device(device)
        self._policy_version = policy_version
        self._timeout_s = timeout_s
        self._scheduler: Scheduler | None = None
        self._wakeup = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._futures: set[asyncio.Future[Any]] = set()
        self._fault: EngineFailure | None = None
        self._closing = False
        self._paused = False
        self._asleep = False
        self._thread: threading.Thread | None = None

    @property
    def evictions(self) -> int:
        """Sessions whose keys and values were dropped for want of slots."""
        return self._scheduler.evictions if self._scheduler else 0

    async def start(self) -> None:
        """Load the model in the engine's thread. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="agentrl-local-engine", daemon=True)
            self._thread.start()
        await self._call(lambda: None)

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample a continuation of `ids`; see `Engine.generate`. A cancelled call is forgotten by the engine."""
        scheduler = self._ready()
        if images:
            raise ConfigError("the local engine runs text models only and takes no images; use --engine sglang")
        if self._asleep:
            raise EngineFailure("the local engine sleeps; wake it before generate", "engine asleep")
        context = list(ids)
        room = check_request(context, sampling, self.context_length)
        if min(context) < 0 or max(context) >= scheduler.model.vocab_size:
            raise EngineFailure(
                f"the context holds ids outside 0..{scheduler.model.vocab_size - 1}", "ids outside the vocabulary"
            )
        if sampling.stop and self._decode is None:
            raise ConfigError("this local engine was made without `decode`; it cannot look for stop strings")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        finder = StopFinder(sampling.stop, self._decode or _no_text)
        request = Request(session, context, sampling, room, finder, lambda answer: _settle(future, answer))
        self._post(lambda: scheduler.add(request), future)
        try:
            return await future
        except asyncio.CancelledError:
            self._post(lambda: scheduler.cancel(request))
            raise

    async def release(self, session: str) -> None:
        """The session is over; its slot is free."""
        scheduler = self._ready()
        await self._call(lambda: scheduler.release(session))

    async def pause(self) -> None:
        """Compute nothing until `resume`; when this returns, the step in progress has ended."""
        self._ready()
        await self._call(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._ready()
        await self._call(lambda: setattr(self, "_paused", False))

    async def abort(self, session: str | None = None) -> None:
        """Give up requests in flight, of one session or all: they raise EngineAbort. Sessions keep their caches."""
        scheduler = self._ready()
        await self._call(lambda: scheduler.abort(session, EngineAbort("the request was aborted", "aborted")))

    async def sleep(self) -> None:
        """Drop keys and values and, on an accelerator, move the weights to the host. Refused while requests are in flight."""
        scheduler = self._ready()

        def command() -> None:
            if scheduler.busy:
                raise EngineFailure(
                    "the local engine cannot sleep while requests are in flight; abort them first", "sleep while busy"
                )
            self._asleep = True
            scheduler.drop_cache()
            scheduler.model.move(torch.device("cpu"))

        await self._call(command)

    async def wake(self) -> None:
        """Be ready for `generate` after `sleep`."""
        scheduler = self._ready()

        def command() -> None:
            scheduler.model.move(self._device)
            self._asleep = False

        await self._call(command)

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Replace the weights in place between two steps; see `Engine.update_weights`. Allowed while paused and while asleep."""
        scheduler = self._ready()

        def command() -> None:
            scheduler.model.update(weights)
            scheduler.weights_changed(policy_version)

        await self._call(command)

    async def health(self) -> EngineInfo:
        """What it is; EngineFailure if the thread died or does not answer within 30 s (or `timeout_s`, if less)."""
        scheduler = self._ready()
        await self._call(lambda: None, timeout_s=min(30.0, self._timeout_s))
        return EngineInfo(
            name="local",
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            policy_version=scheduler.policy_version,
            context_length=self.context_length,
            deterministic=scheduler.model.batch_invariant,
        )

    async def close(self) -> None:
        """Stop the thread; requests in flight raise EngineFailure. Idempotent."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, self._timeout_s)

    @property
    def context_length(self) -> int:
        """Most tokens of context and generation together."""
        model = self._ready().model
        return min(self._context_length or model.context_length, model.context_length)

    def _ready(self) -> Scheduler:
        """The scheduler, or the reason why there is none."""
        if self._fault is not None:
            raise EngineFailure(str(self._fault), self._fault.cause) from self._fault
        if self._closing:
            raise EngineFailure(_CLOSED, "engine closed")
        if self._scheduler is None:
            raise EngineFailure("the local engine was not started; await start() first", "engine not started")
        return self._scheduler

    async def _call(self, command: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run a command in the engine's thread between two steps."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                answer: Any = command()
            except AgentRLError as e:
                answer = e
            _settle(future, answer)

        self._post(run, future)
        try:
            return await asyncio.wait_for(future, limit)
        except TimeoutError:
            raise EngineFailure(f"the local engine did not answer within {limit:g} s", "engine timeout") from None

    def _post(self, command: Callable[[], None], future: asyncio.Future[Any] | None = None) -> None:
        """Hand a command to the thread; `future` fails if the thread is gone."""
        with self._wakeup:
            gone = self._fault or (EngineFailure(_CLOSED, "engine closed") if self._closing else None)
            if gone is None:
                self._commands.append(command)
                if future is not None:
                    self._futures.add(future)
                    future.add_done_callback(self._futures.discard)
                self._wakeup.notify()
        if gone is not None and future is not None:
            future.set_exception(EngineFailure(str(gone), gone.cause))

    def _work(self) -> None:
        """The engine's thread."""
        end = EngineFailure(_CLOSED, "engine closed")
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            model = LocalModel(self._model_dir, dtype=self._dtype, device=self._device)
            self._scheduler = Scheduler(model, self._max_running, self._policy_version)
            while self._turn(self._scheduler):
                pass
        except EngineFailure as e:
            end = self._fault = e
        except BaseException as e:  # noqa: BLE001 (whatever it is, nobody may wait for a thread that is gone)
            end = EngineFailure(
                f"the local engine's thread failed: {type(e).__name__}: {e}", f"engine fault: {type(e).__name__}"
            )
            end.__cause__ = e
            self._fault = end
        self._fail_all(end)

    def _turn(self, scheduler: Scheduler) -> bool:
        """Run the commands that came, then one step; wait if there is nothing to do. False: closed."""
        with self._wakeup:
            while not (self._commands or self._closing or (scheduler.busy and not self._paused)):
                self._wakeup.wait()
            if scheduler.crowded and not self._paused:  # the idle sessions' next requests may be on their way
                self._wakeup.wait_for(lambda: self._commands or self._closing, GRACE_S)
            if self._closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        if scheduler.busy and not self._paused:
            scheduler.step()
        return True

    def _fail_all(self, end: EngineFailure) -> None:
        """Answer everybody who waits."""
        with self._wakeup:
            waiting = list(self._futures)
            self._commands.clear()
        for future in waiting:
            failure = EngineFailure(str(end), end.cause)
            failure.__cause__ = end.__cause__
            _settle(future, failure)


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    """Set a future's result, or its exception, from another thread."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return


def _no_text(ids: Sequence[int]) -> str:
    return ""
