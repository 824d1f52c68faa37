"""Lets generations through to the engine, and waits for those in flight before a weight update, if none may be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation, Generator, SamplingParams
from agentrl.run.timeline import Timeline


class GenerationGate:
    """A `Generator` in front of an engine, whose generations are spans of a timeline.

    While it is closed, new generations wait; those in flight are finished before.
    """

    def __init__(self, engine: Generator, timeline: Timeline | None = None) -> None:
        self.engine = engine
        self.timeline = timeline or Timeline()
        self.sampled_tokens = 0
        """of all generations that have ended"""
        self._in_flight = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """See `Generator.generate`."""
        await self._open.wait()
        self._in_flight += 1
        self._idle.clear()
        try:
            with self.timeline.span("engine", session):
                generation = await self.engine.generate(ids, sampling, session=session, images=images)
            if isinstance(generation, Generation):
                self.sampled_tokens += len(generation.ids)
            return generation
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def release(self, session: str) -> None:
        """See `Generator.release`."""
        await self.engine.release(session)

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """A block in which no generation is in flight. Episodes inside a tool are not waited for."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()
