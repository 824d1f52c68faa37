"""Limits the starts per second, evenly spaced, over all tasks of one event loop."""

from __future__ import annotations

import asyncio


class RateLimit:
    """Hands out starting times that are at least 1 / `per_second` apart, in the order in which they were requested.

    Args:
        per_second: starts per second; None: no limit.
    """

    def __init__(self, per_second: float | None) -> None:
        self._interval = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        """Wait for the next starting time."""
        if not self._interval:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._next)
        self._next = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)
