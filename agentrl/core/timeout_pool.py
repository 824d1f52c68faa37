"""Running user code (sync or async) under a time limit without ever blocking the event loop.

Async functions run as tasks, sync ones in a bounded pool of threads of their own. Neither can be made to stop: a thread cannot be killed,
a coroutine may swallow its cancellation. One that goes on past its time limit is abandoned and counted, and once `max_abandoned` of them
hang, the pool refuses new work at once instead of piling it up.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from agentrl.errors import InfraError

CANCEL_GRACE_S = 1.0
"""how long a cancelled coroutine may take to clean up before it counts as hanging"""


_PURE = "__agentrl_pure__"
F = TypeVar("F", bound=Callable[..., Any])


def pure(fn: F) -> F:
    """Mark a quick function that never blocks: it is called directly, without a thread."""
    setattr(fn, _PURE, True)
    return fn


class PoolExhaustedError(InfraError):
    """Too many calls hang in this pool; it takes no more."""


class DeadlineError(TimeoutError):
    """The pool's own time limit ran out (other than a TimeoutError that user code raised)."""


class Pool:
    """At most `threads` sync calls at once; further ones wait, and their time starts when they do. Async calls need no thread.

    Daemon threads, so a call that never returns does not keep the process alive.
    """

    def __init__(self, name: str, threads: int = 8, max_abandoned: int = 8) -> None:
        self.name = name
        self.max_abandoned = max_abandoned
        self.abandoned = 0
        """calls that ran out of time, or were cancelled, and still hang"""
        self._slots = asyncio.Semaphore(threads)
        self._work: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    async def call(self, fn: Callable[..., Any], /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`, sync or async, for at most `timeout_s` seconds.

        Raises:
            DeadlineError: it took longer (a TimeoutError).
            PoolExhaustedError: `max_abandoned` calls hang already.
        """
        if getattr(fn, _PURE, False):
            return fn(*args, **kwargs)
        work = partial(fn, *args, **kwargs)
        if is_async(fn):
            self._check()
            return await self._wait_for(work(), timeout_s)
        async with self._slots:
            self._check()
            result = await self._in_thread(work, timeout_s)
        return await self._wait_for(result, timeout_s) if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let idle threads end; hanging ones are left behind."""
        with self._lock:
            for _ in range(self._idle):
                self._work.put(None)
            self._idle = 0

    def _check(self) -> None:
        if self.abandoned >= self.max_abandoned:
            raise PoolExhaustedError(
                f"{self.name}: {self.abandoned} calls hang past their time limit; no more are taken"
            )

    async def _wait_for(self, awaitable: Awaitable[Any], timeout_s: float | None) -> Any:
        """As asyncio.wait_for, but also when the coroutine swallows its cancellation, cancels itself or calls sys.exit."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        task = loop.create_task(_contained(awaitable, waiter))
        try:
            await _settled(task, timeout_s, waiter)
        finally:
            if late := not task.done():
                task.cancel()
                await _settled(task, CANCEL_GRACE_S)
                if not task.done():
                    self._count(1)
                    task.add_done_callback(self._returned)
        if late:
            if task.done() and not task.cancelled():
                task.exception()  # seen, so that asyncio does not report it
            raise DeadlineError(f"{self.name}: took longer than {timeout_s:g} s")
        if task.cancelled():
            raise RuntimeError("the call cancelled itself")
        return task.result()

    def _returned(self, task: asyncio.Future[Any]) -> None:
        self._count(-1)
        if not task.cancelled():
            task.exception()

    def _count(self, n: int) -> None:
        with self._lock:
            self.abandoned += n

    async def _in_thread(self, work: Callable[[], Any], timeout_s: float | None) -> Any:
        call = _Call(work)
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._run, name=self.name, daemon=True).start()
        self._work.put(call)
        try:
            await _settled(call.outcome, timeout_s)
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
        """A thread: take calls until told to end, or until one was abandoned (its place was given away)."""
        while (call := self._work.get()) is not None:
            outcome = call.run()
            with self._lock:
                call.finished = True
                if call.abandoned:
                    self.abandoned -= 1
                    return
                self._idle += 1
            call.settle(outcome)


class _Call:
    """A sync call on its way through a thread. `outcome` holds (value, error), never an exception: asyncio cannot carry every kind."""

    __slots__ = ("_loop", "abandoned", "finished", "outcome", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.work = work
        self.outcome: asyncio.Future[tuple[Any, Exception | None]] = self._loop.create_future()
        self.abandoned = False
        self.finished = False

    def settle(self, outcome: tuple[Any, Exception | None]) -> None:
        """Hand the outcome to the event loop, if that still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: tuple[Any, Exception | None]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def run(self) -> tuple[Any, Exception | None]:
        try:
            return self.work(), None
        except Exception as e:  # noqa: BLE001  handed to whoever awaits, as an Executor does
            return None, e
        except BaseException as e:  # noqa: BLE001  sys.exit in user code must not end the run
            return None, RuntimeError(f"{type(e).__name__}: {e}")


async def _settled(
    future: asyncio.Future[Any], timeout_s: float | None, waiter: asyncio.Future[None] | None = None
) -> None:
    """Wait until it is done or the time is up. As asyncio.wait, for one, at half the cost.

    `waiter` is waited for; who makes `future` done may make it done as well, which spares a turn of the event loop.
    """
    loop = asyncio.get_running_loop()
    waiter = waiter or loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    timer = loop.call_later(timeout_s, wake) if timeout_s is not None else None
    try:
        await waiter
    finally:
        future.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


async def _contained(awaitable: Awaitable[Any], waiter: asyncio.Future[None]) -> Any:
    """Await it, then wake who waits; sys.exit in user code must not end the run."""
    try:
        return await awaitable
    except SystemExit as e:
        raise RuntimeError(f"SystemExit: {e}") from e
    finally:
        if not waiter.done():
            waiter.set_result(None)


def is_async(fn: Callable[..., Any]) -> bool:
    """True if calling `fn` gives a coroutine (also for partials, and objects with an async `__call__`)."""
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
