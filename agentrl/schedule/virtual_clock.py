"""An event loop whose clock jumps to the next timer, so that hours of waiting are simulated in milliseconds and always alike.

It is for code without threads and sockets: only timers move its clock. A loop in which nothing can happen any more raises `Deadlock`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
