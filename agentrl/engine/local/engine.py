"""The local engine: a causal language model of transformers in this process, for CPUs and small models.

It is deterministic: the same calls of a session, with the same ids, sampling parameters and seeds, give bit-exact ids and log-probs at any load
(`kv_cache` explains how). The model runs in a separate thread. A fault in that thread fails every waiting request and every later call. Use
SGLang for large models.
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
PREEMPTION_DELAY_S = 0.01
"""Before an idle session is preempted, its next request is awaited for this time."""
HEALTH_S = 30.0
_CLOSED = "the local engine is closed"
_NOT_STARTED = "the local engine was not started; await start() first"


class LocalEngine:
    """An `Engine` in this process.

    Args:
        model_dir: a Hugging Face model folder.
        decode: ids -> text; required for stop strings.
        max_running: maximum number of sessions that hold keys and values (see `scheduler`).
        context_length: maximum tokens of context and generation; None: the model's.
        threads: of torch in the engine's thread; None: torch's default.
        dtype: of the weights and the cache.
        device: of the weights and the cache.
        policy_version: of the weights in `model_dir`.
        keep_interrupted: generations that a weight update interrupts keep their tokens and continue with the new weights.
        records_experts: return the routed experts of generations that ask for them.
        single_token_chunks: see `LocalModel`; slower, and bit-equal to the trainer's forward (train/megatron/engine_forward.py).
        adapter: the one of several that its weights have; requests for others are refused.
        timeout_s: limit of every call other than `generate`, the step in progress included.
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
        keep_interrupted: bool = False,
        records_experts: bool = False,
        single_token_chunks: bool = False,
        adapter: str | None = None,
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
        self._keep_interrupted = keep_interrupted
        self._records_experts = records_experts
        self._single_token_chunks = single_token_chunks
        self._adapter = adapter
        self._timeout_s = timeout_s
        self._scheduler: Scheduler | None = None
        self._wakeup = threading.Condition()
        self._commands: deque[Callable[[Scheduler], None]] = deque()
        self._futures: set[asyncio.Future[Any]] = set()
        self._fault: EngineFailure | None = None
        self._closing = self._paused = self._asleep = False
        self._thread: threading.Thread | None = None

    @property
    def preemptions(self) -> int:
        """How often an idle session's keys and values were freed for another session."""
        return self._scheduler.preemptions if self._scheduler else 0

    @property
    def context_length(self) -> int:
        """Maximum tokens of context and generation together."""
        model = self._model()
        return min(self._context_length or model.context_length, model.context_length)

    async def start(self) -> None:
        """Load the model in the engine's thread. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agentrl-local-engine", daemon=True)
            self._thread.start()
        await self._call(lambda _: None)

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """See `Engine.generate`. If the call is cancelled, the request is dropped."""
        model = self._model()
        if images:
            raise ConfigError("the local engine runs text models only and takes no images; use --engine sglang")
        if sampling.adapter is not None and self._adapter != sampling.adapter:
            raise EngineFailure(
                f"the request names the adapter {sampling.adapter!r}, and this local engine has {self._adapter or 'no adapters'}",
                "unknown adapter",
            )
        if self._asleep:
            raise EngineFailure("the local engine is asleep; call wake before generate", "engine asleep")
        context = list(ids)
        max_new_tokens = check_request(context, sampling, self.context_length)
        if min(context) < 0 or max(context) >= model.vocab_size:
            raise EngineFailure(
                f"the context has ids outside 0..{model.vocab_size - 1}; is its tokenizer the model's?",
                "ids outside the vocabulary",
            )
        if sampling.stop and self._decode is None:
            raise ConfigError("this local engine was created without `decode`, which stop strings require")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        request = Request(
            session=session,
            context=context,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop_finder=StopFinder(sampling.stop, self._decode or _no_text),
            on_finish=lambda result: _resolve(future, result),
        )
        self._post(lambda scheduler: scheduler.add(request), future)
        try:
            return await future
        except asyncio.CancelledError:
            self._post(lambda scheduler: scheduler.cancel(request))
            raise

    async def release(self, session: str) -> None:
        """End the session and free its slot."""
        await self._call(lambda scheduler: scheduler.release(session))

    async def pause(self) -> None:
        """Compute nothing until `resume`. The step in progress is finished first."""
        await self._call(lambda _: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._call(lambda _: setattr(self, "_paused", False))

    async def abort(self, session: str | None = None) -> None:
        """Abort requests in flight, of one session or all: they raise EngineAbort. Sessions keep their caches."""
        reason = EngineAbort("the request was aborted", "aborted")
        await self._call(lambda scheduler: scheduler.abort(session, reason))

    async def sleep(self) -> None:
        """Free keys and values, and move the weights to the CPU. Refused while requests are in flight."""

        def command(scheduler: Scheduler) -> None:
            if scheduler.busy:
                raise EngineFailure(
                    "the local engine cannot sleep while requests are in flight; abort them first", "sleep while busy"
                )
            self._asleep = True
            scheduler.free_cache()
            scheduler.model.move(torch.device("cpu"))

        await self._call(command)

    async def wake(self) -> None:
        """Move the weights back and accept generations."""

        def command(scheduler: Scheduler) -> None:
            scheduler.model.move(self._device)
            self._asleep = False

        await self._call(command)

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Replace the weights in place between two steps; see `Engine.update_weights`. Allowed while paused or asleep."""

        def command(scheduler: Scheduler) -> None:
            scheduler.model.update(weights)
            scheduler.weights_changed(policy_version)

        await self._call(command)

    async def health(self) -> EngineInfo:
        """The engine's properties.

        Raises:
            EngineFailure: the thread died or does not respond.
        """
        policy_version = await self._call(lambda s: s.policy_version, timeout_s=min(HEALTH_S, self._timeout_s))
        return EngineInfo(
            name="local",
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            policy_version=policy_version,
            context_length=self.context_length,
            deterministic=self._model().batch_invariant,
        )

    async def close(self) -> None:
        """Stop the thread. Requests in flight raise EngineFailure. Idempotent."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, self._timeout_s)

    # -- from the event loop to the thread -----------------------------------------------------------------------------

    def _model(self) -> LocalModel:
        """The model of a running engine.

        Raises:
            EngineFailure: not started, closed, or failed.
        """
        failure = self._failure()
        if failure is not None or self._scheduler is None:
            raise failure or EngineFailure(_NOT_STARTED, "engine not started")
        return self._scheduler.model

    def _failure(self) -> EngineFailure | None:
        """Why the thread takes no commands; None: it does."""
        if self._fault is not None:
            failure = EngineFailure(str(self._fault), self._fault.cause)
            failure.__cause__ = self._fault
            return failure
        if self._closing:
            return EngineFailure(_CLOSED, "engine closed")
        if self._thread is None:
            return EngineFailure(_NOT_STARTED, "engine not started")
        return None

    async def _call(self, command: Callable[[Scheduler], T], timeout_s: float | None = None) -> T:
        """Run a command in the engine's thread between two steps."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run(scheduler: Scheduler) -> None:
            try:
                result: Any = command(scheduler)
            except AgentRLError as e:
                result = e
            _resolve(future, result)

        self._post(run, future)
        try:
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            raise EngineFailure(f"the local engine did not respond within {limit_s:g} s", "engine timeout") from None

    def _post(self, command: Callable[[Scheduler], None], future: asyncio.Future[Any] | None = None) -> None:
        """Queue a command for the thread. `future` fails if the thread has ended, or ends first."""
        with self._wakeup:
            failure = self._failure()
            if failure is None:
                self._commands.append(command)
                if future is not None:
                    self._futures.add(future)
                    future.add_done_callback(self._futures.discard)
                self._wakeup.notify()
        if failure is not None and future is not None:
            future.set_exception(failure)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The engine's thread: load the model, then steps and commands until the engine is closed."""
        failure = EngineFailure(_CLOSED, "engine closed")
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            model = LocalModel(
                self._model_dir,
                dtype=self._dtype,
                device=self._device,
                single_token_chunks=self._single_token_chunks,
                records_experts=self._records_experts,
            )
            self._scheduler = Scheduler(
                model, self._max_running, self._policy_version, keep_interrupted=self._keep_interrupted
            )
            while self._iterate(self._scheduler):
                pass
        except EngineFailure as e:
            failure = self._fault = e
        except BaseException as e:  # noqa: BLE001 (whatever it is, no request may wait for a thread that has ended)
            failure = EngineFailure(
                f"the local engine's thread failed: {type(e).__name__}: {e}", f"engine fault: {type(e).__name__}"
            )
            failure.__cause__ = e
            self._fault = failure
        self._fail_all(failure)

    def _iterate(self, scheduler: Scheduler) -> bool:
        """Wait until there is something to do, then run the queued commands and one step. False: the engine is closed."""
        with self._wakeup:
            while not (self._commands or self._closing or (scheduler.busy and not self._paused)):
                self._wakeup.wait()
            if scheduler.must_preempt and not self._paused:
                self._wakeup.wait_for(lambda: self._commands or self._closing, PREEMPTION_DELAY_S)
            if self._closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(scheduler)
        if scheduler.busy and not self._paused:
            scheduler.step()
        return True

    def _fail_all(self, failure: EngineFailure) -> None:
        """Fail everything that waits for the thread."""
        with self._wakeup:
            futures = list(self._futures)
            self._commands.clear()
        for future in futures:
            copy = EngineFailure(str(failure), failure.cause)
            copy.__cause__ = failure.__cause__
            _resolve(future, copy)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result or exception from another thread."""

    def resolve() -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    try:
        future.get_loop().call_soon_threadsafe(resolve)
    except RuntimeError:  # the loop is closed: nothing waits any more
        return


def _no_text(ids: Sequence[int]) -> str:
    return ""
