"""Time limits of many waits with one timer. Nearly all waits end before their limit, so a timer for each would be made and cancelled in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Calls `expire(key)` for each key that was added and not removed within its time. All waits at one time are on one event loop."""

    def __init__(self, expire: Callable[[K], None]) -> None:
        self._expire = expire
        self._ends: dict[K, float] = {}
        """loop time of the end of each wait"""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0
        """when the timer runs; never later than the first end"""

    def add(self, key: K, timeout_s: float) -> None:
        """Begin a wait. `remove` must follow unless it expires."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._change_loop(loop)
        end = self._ends[key] = loop.time() + timeout_s
        if self._timer is None or end < self._next:
            self._set_timer(loop, end)

    def remove(self, key: K) -> None:
        """End a wait. The timer stays: it is set again when it runs, since another wait is likely to begin before."""
        self._ends.pop(key, None)

    def _change_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ends and self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("waits of two event loops at the same time cannot share their deadlines")
        self._ends.clear()
        self._loop, self._timer = loop, None

    def _set_timer(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = loop.call_at(when, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            return
        self._timer = None
        now = max(loop.time(), self._next)  # the loop runs timers up to its clock's resolution early
        expired = [key for key, end in self._ends.items() if end <= now]
        for key in expired:
            del self._ends[key]
        if self._ends:
            self._set_timer(loop, min(self._ends.values()))
        for key in expired:
            self._expire(key)
