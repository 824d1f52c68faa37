"""Calls of user code, sync or async, under a time limit and without blocking the event loop.

Async functions run as tasks, sync functions in a bounded pool of threads. Neither can be forced to stop: a thread cannot be killed, and a
coroutine may suppress its cancellation. A call that exceeds its time limit is abandoned and counted. While `max_abandoned` calls hang, new
ones wait until one returns; if none does within `patience_s`, they are refused.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from agentrl.core.deadlines import Deadlines
from agentrl.errors import InfraError, describe

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Default of `TimeoutPool.patience_s`."""
CANCEL_GRACE_S = 1.0
"""Time that a cancelled coroutine has for its cleanup before it counts as hanging."""
_PURE = "__agentrl_pure__"
F = TypeVar("F", bound=Callable[..., Any])


def pure(fn: F) -> F:
    """Mark a fast function that never blocks; it is called directly, without a thread."""
    setattr(fn, _PURE, True)
    return fn


class PoolExhaustedError(InfraError):
    """Too many calls hang in this pool; it refuses further ones."""


class DeadlineError(TimeoutError):
    """The pool's time limit expired, as opposed to a TimeoutError that user code raised."""


class TimeoutPool:
    """Runs at most `threads` sync calls at a time. Further ones wait; their time limit starts when they do. Async calls need no thread.

    The threads are daemons, so a call that never returns does not keep the process alive.

    Args:
        name: of the threads, and in error messages.
        threads: sync calls at a time.
        max_abandoned: hanging calls, while which new ones wait.
        patience_s: how long a call waits for one of them to return before it is refused, in seconds.
    """

    def __init__(self, name: str, threads: int = 8, max_abandoned: int = 8, patience_s: float = PATIENCE_S) -> None:
        self.name = name
        self.max_abandoned = max_abandoned
        self.patience_s = patience_s
        self.abandoned = 0
        """calls that timed out or were cancelled, and have not returned"""
        self._slots = asyncio.Semaphore(threads)
        self._work: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = 0
        self._waiting: set[asyncio.Future[None]] = set()
        """calls that wait for a hanging one to return"""
        self._warned = False
        self._lock = threading.Lock()
        self._deadlines: Deadlines[asyncio.Future[None]] = Deadlines(_complete)

    async def call(self, fn: Callable[..., Any], /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`, sync or async, for at most `timeout_s` seconds.

        Raises:
            DeadlineError: it took longer; a TimeoutError.
            PoolExhaustedError: `max_abandoned` calls hang, and none of them returned within `patience_s`.
        """
        if getattr(fn, _PURE, False):
            return fn(*args, **kwargs)
        work = partial(fn, *args, **kwargs)
        if is_async(fn):
            await self._room()
            return await self._wait_for(work(), timeout_s)
        async with self._slots:
            await self._room()
            result = await self._in_thread(work, timeout_s)
        return await self._wait_for(result, timeout_s) if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let idle threads end; hanging calls are left behind."""
        with self._lock:
            for _ in range(self._idle):
                self._work.put(None)
            self._idle = 0

    async def _room(self) -> None:
        """Wait until fewer than `max_abandoned` calls hang."""
        if self.abandoned < self.max_abandoned:
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: %d calls still run past their time limit; further calls wait until one returns, at most %g s",
                self.name,
                self.abandoned,
                self.patience_s,
            )
        loop = asyncio.get_running_loop()
        end = loop.time() + self.patience_s
        while True:
            returned: asyncio.Future[None] = loop.create_future()
            with self._lock:
                if self.abandoned < self.max_abandoned:
                    return
                self._waiting.add(returned)
            try:
                await self._settled(returned, max(0.0, end - loop.time()))
            finally:
                with self._lock:
                    self._waiting.discard(returned)
            if not returned.done():
                raise PoolExhaustedError(
                    f"{self.name}: {self.abandoned} calls hang past their time limit; a further call waited "
                    f"{self.patience_s:g} s for one of them to return"
                )

    def _returned_one(self) -> None:
        """An abandoned call has returned. The caller holds the lock."""
        self.abandoned -= 1
        for returned in self._waiting:
            with suppress(RuntimeError):  # its event loop is closed
                returned.get_loop().call_soon_threadsafe(_complete, returned)

    async def _wait_for(self, awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
        """asyncio.wait_for, which also works if the coroutine suppresses its cancellation, cancels itself or calls sys.exit."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        task = loop.create_task(_contained(awaitable, waiter))
        try:
            await self._settled(task, timeout_s, waiter)
        finally:
            if late := not task.done():
                task.cancel()
                await self._settled(task, CANCEL_GRACE_S)
                if not task.done():
                    with self._lock:
                        self.abandoned += 1
                    task.add_done_callback(self._returned)
        if late:
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
            raise DeadlineError(f"{self.name}: took longer than {timeout_s:g} s")
        if task.cancelled():
            raise RuntimeError("the call cancelled itself")
        return task.result()

    def _returned(self, task: asyncio.Future[Any]) -> None:
        with self._lock:
            self._returned_one()
        if not task.cancelled():
            task.exception()

    async def _settled(
        self, future: asyncio.Future[Any], timeout_s: float | None, waiter: asyncio.Future[None] | None = None
    ) -> None:
        """Wait until the future is done or the time has expired: asyncio.wait for one future, at half the cost.

        `waiter`: the future that is awaited; code that completes `future` may complete it too, which saves an iteration of the event loop.
        """
        waiter = waiter or asyncio.get_running_loop().create_future()
        wake = partial(_wake, waiter)
        future.add_done_callback(wake)
        if timeout_s is not None:
            self._deadlines.add(waiter, timeout_s)
        try:
            await waiter
        finally:
            future.remove_done_callback(wake)
            if timeout_s is not None:
                self._deadlines.remove(waiter)

    async def _in_thread(self, work: Callable[[], Any], timeout_s: float | None) -> Any:
        call = _Call(work)
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._run, name=self.name, daemon=True).start()
        self._work.put(call)
        try:
            await self._settled(call.outcome, timeout_s)
        finally:
            if late := not call.outcome.done():
                self._abandon(call)
                call.outcome.cancel()
        if late:
            raise DeadlineError(f"{self.name}: took longer than {timeout_s:g} s")
        value, error = call.outcome.result()
        if error is not None:
            raise error
        return value

    def _abandon(self, call: _Call) -> None:
        with self._lock:
            if not call.finished:
                call.abandoned = True
                self.abandoned += 1

    def _run(self) -> None:
        """One thread: run calls until None arrives, or until a call was abandoned, whose slot another thread has."""
        while (call := self._work.get()) is not None:
            outcome = call.run()
            with self._lock:
                call.finished = True
                if call.abandoned:
                    self._returned_one()
                    return
                self._idle += 1
            call.settle(outcome)


class _Call:
    """A sync call in a thread. `outcome` resolves to (value, error), since a future cannot raise every kind of exception."""

    __slots__ = ("_loop", "abandoned", "finished", "outcome", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.work = work
        self.outcome: asyncio.Future[tuple[Any, Exception | None]] = self._loop.create_future()
        self.abandoned = False
        self.finished = False

    def settle(self, outcome: tuple[Any, Exception | None]) -> None:
        """Pass the outcome to the event loop, if it still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: tuple[Any, Exception | None]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def run(self) -> tuple[Any, Exception | None]:
        try:
            return self.work(), None
        except Exception as e:  # noqa: BLE001  raised in the awaiting task
            return None, e
        except BaseException as e:  # noqa: BLE001  sys.exit in user code must not end the run
            return None, RuntimeError(describe(e))


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    _complete(waiter)


async def _contained(awaitable: Awaitable[Any], waiter: asyncio.Future[None]) -> Any:
    """Await it, then complete `waiter`; sys.exit, or any other BaseException of user code, must not end the run."""
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):  # Ctrl-C stops the run
        raise
    except BaseException as e:
        raise RuntimeError(describe(e)) from e
    finally:
        if not waiter.done():
            waiter.set_result(None)


def is_async(fn: Callable[..., Any]) -> bool:
    """True if calling `fn` returns a coroutine; also for partials, and objects with an async `__call__`."""
    while isinstance(fn, partial):
        fn = fn.func
    if (
        getattr(getattr(fn, "__code__", None), "co_flags", 0) & inspect.CO_COROUTINE
    ):  # the usual case, at a tenth of the cost
        return True
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
