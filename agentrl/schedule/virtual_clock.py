"""An event loop whose clock jumps to the next timer, so that hours of waiting are simulated in milliseconds and always alike.

Only timers move its clock, so it is for code without sockets. What runs in an executor (`asyncio.to_thread`) runs at once; with `spend` it takes
virtual time. A loop in which nothing can happen any more raises `Deadlock`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_spent: list[float] = []
"""virtual time of the functions that executors run at the moment, the innermost last"""


class Deadlock(RuntimeError):
    """Every task waits for another, and no timer is left."""


class _NoWait(selectors.DefaultSelector):
    """A selector that never blocks: it moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise Deadlock("nothing can happen any more: every task waits for another")
        if not events and timeout:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that takes no time to wait. `time()` starts at 0."""

    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call `func` now. Its result arrives after the virtual time that it spent."""
        future: asyncio.Future[T] = self.create_future()
        _spent.append(0.0)
        result, error = None, None
        try:
            result = func(*args)
        except Exception as e:  # noqa: BLE001  as an executor does, it passes on whatever was raised
            error = e
        self.call_later(_spent.pop(), _set, future, result, error)
        return future


def spend(seconds: float) -> None:
    """Called by a function in an executor of a virtual loop: it takes this time. Elsewhere it does nothing."""
    if _spent:
        _spent[-1] += seconds


def _set(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock and return its result.

    Raises:
        Deadlock: the coroutine can never finish.

    Example:
        >>> run_virtual(asyncio.sleep(3600, "an hour later"))
        'an hour later'
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
