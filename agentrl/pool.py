"""Running user code (sync or async) under a time limit without ever blocking the event loop.

Async functions are awaited with a timeout. Sync ones run in a bounded pool of threads of their own. A thread cannot be
killed: one that runs out of time is abandoned and counted, and once `max_abandoned` of them hang, the pool refuses new
work at once instead of piling it up.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from agentrl.errors import InfraError


class PoolExhaustedError(InfraError):
    """Too many calls hang in this pool; it takes no more."""


class Pool:
    """At most `threads` sync calls at once; further ones wait. Async calls need no thread.

    Daemon threads, so a call that never returns does not keep the process alive.
    """

    def __init__(self, name: str, threads: int = 8, max_abandoned: int = 8) -> None:
        self.name = name
        self.threads = threads
        self.max_abandoned = max_abandoned
        self.abandoned = 0
        """calls that ran out of time and still hang"""
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._started = 0
        self._idle = 0
        self._lock = threading.Lock()

    async def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`, sync or async, for at most `timeout_s` seconds.

        Raises:
            TimeoutError: it took longer.
            PoolExhaustedError: `max_abandoned` sync calls hang already.
        """
        if is_async(fn):
            return await asyncio.wait_for(fn(*args, **kwargs), timeout_s)
        if self.abandoned >= self.max_abandoned:
            raise PoolExhaustedError(f"{self.name}: {self.abandoned} calls hang past their time limit; no more are taken")
        future = self._submit(lambda: fn(*args, **kwargs))
        try:
            result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            self._abandon(future)
            raise
        return await asyncio.wait_for(result, timeout_s) if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let idle threads end; hanging ones are left behind."""
        with self._lock:
            for _ in range(self._started):
                self._work.put(None)
            self._started = 0

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._work.put((future, work))
            if self._idle == 0 and self._started < self.threads + self.abandoned:
                self._started += 1
                threading.Thread(target=self._run, name=f"{self.name}-{self._started}", daemon=True).start()
        return future

    def _abandon(self, future: Future[Any]) -> None:
        if future.cancel():
            return  # it had not begun
        with self._lock:
            self.abandoned += 1
        future.add_done_callback(self._returned)

    def _returned(self, _: Future[Any]) -> None:
        with self._lock:
            self.abandoned -= 1

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            item = self._work.get()
            with self._lock:
                self._idle -= 1
            if item is None:
                return
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as e:  # handed to whoever awaits the future, as Executor does
                future.set_exception(e)
            else:
                future.set_result(result)


def is_async(fn: Callable[..., Any]) -> bool:
    """True if calling `fn` gives a coroutine (also for objects with an async `__call__`)."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
