"""Progress inside a rollout or an evaluation: episodes done, tokens per second, and the time left."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation, Generator, SamplingParams

LINE_INTERVAL_S = 30.0
"""seconds between two lines, where there is no terminal"""
BAR_INTERVAL_S = 1.0
"""seconds between two updates of the bar's rate, on a terminal"""


class Progress:
    """Shows how far the episodes are: as a bar on a terminal, otherwise as a line now and then. A context manager."""

    def __init__(self, total: int, description: str, show_line: Callable[[str], None]) -> None:
        """`total` is the number of episodes; `show_line` shows and logs a line."""
        self.total, self.description = total, description
        self.done = self.tokens = self.running = 0
        self._show_line = show_line
        self._started = time.perf_counter()
        self._bar = tqdm(total=total, desc=description, unit="episode", leave=False, disable=not sys.stderr.isatty())
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ticker is not None, "entered before"
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        self._bar.close()

    def episode_done(self) -> None:
        """Count a finished episode."""
        self.done += 1
        self._bar.update()

    def line(self) -> str:
        """The progress in words."""
        elapsed = time.perf_counter() - self._started
        rate = self.tokens / elapsed if elapsed > 0 else 0.0
        left = (
            f"about {_duration(elapsed / self.done * (self.total - self.done))} left"
            if self.done
            else "no episode done yet"
        )
        # tokens are counted when their generation ends, so a rate of 0 may mean long generations
        rates = f"{rate:,.0f} sampled tokens/s, {self.running} generations running"
        return f"{self.description}: {self.done} of {self.total} episodes, {rates}, {left}"

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S if self._bar.disable else BAR_INTERVAL_S)
            if self._bar.disable:
                self._show_line(self.line())
            else:
                elapsed = time.perf_counter() - self._started
                self._bar.set_postfix_str(f"{self.tokens / elapsed:,.0f} tokens/s")


class CountedGenerator:
    """A generator that adds the sampled tokens to the progress, and counts the generations that run."""

    def __init__(self, generator: Generator, progress: Progress) -> None:
        self._generator, self._progress = generator, progress

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """See `Generator.generate`."""
        self._progress.running += 1
        try:
            generation = await self._generator.generate(ids, sampling, session=session, images=images)
        finally:
            self._progress.running -= 1
        if isinstance(generation, Generation):
            self._progress.tokens += len(generation.ids)
        return generation

    async def release(self, session: str) -> None:
        """See `Generator.release`."""
        await self._generator.release(session)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
