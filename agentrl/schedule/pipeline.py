"""Plays the groups that a window lets start, and hands over those that it lets be trained on.

    async with Pipeline(WindowedFifo(pace, total), play) as pipeline:
        for _ in range(rollouts):
            groups = await pipeline.take()
            ...                       # train, while the others go on
            if pipeline.fifo.publish_due:
                async with pipeline.publishing():
                    ...               # bring the weights to the engines

The pipeline has no clock and knows nothing of episodes: `play` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from agentrl.schedule.window import WindowedFifo

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """A slot that is trained on."""

    slot: int
    staleness: int
    """rollouts that were trained on between the weights it started with and its own rollout"""
    outcome: T


class Pipeline(Generic[T]):
    """Runs slots of a window.

    Args:
        fifo: the window; it may continue a state.
        play: plays the slot with this number. It is called in order of submission; its coroutine may finish in any order.
        outcomes: of slots that finished before the state of `fifo` was saved.
    """

    def __init__(
        self,
        fifo: WindowedFifo,
        play: Callable[[int], Coroutine[Any, Any, T]],
        outcomes: Mapping[int, T] | None = None,
    ) -> None:
        self.fifo = fifo
        self.outcomes: dict[int, T] = dict(outcomes or {})
        """results of slots that have finished and were not taken"""
        self._play = play
        self._tasks: dict[int, asyncio.Task[T]] = {}
        self._stopped: list[int] = []
        """slots that start again after the next weight update"""
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start the slots that were in flight when the window's state was saved, then all others that may start."""
        for slot in self.fifo.waiting:
            if not self.fifo.is_finished(slot):
                self._start(slot)
        self._admit()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what is in flight and wait for it."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def take(self) -> list[Taken[T]]:
        """Wait for the next rollout and return its slots in order of submission.

        Raises:
            BaseException: `play` raised it.
        """
        await self._until(lambda: self.fifo.ready)
        taken = [Taken(slot, staleness, self.outcomes.pop(slot)) for slot, staleness in self.fifo.take()]
        self._admit()
        return taken

    async def stop_rest(self) -> dict[int, T | None]:
        """Stop the slots that have started and were not taken; they start again after the next weight update.

        Returns:
            The outcomes of all these slots; None: it had not finished.
        """
        self._stopped = self.fifo.stop_rest()
        tasks = [task for slot in self._stopped if (task := self._tasks.pop(slot, None)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {slot: self.outcomes.pop(slot, None) for slot in self._stopped}

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """The block brings the weights to the engines. Afterwards more slots start. With whole rollouts it waits until none is in flight."""
        if self.fifo.pace.whole_rollouts:
            await self._until(lambda: not self.fifo.in_flight)
        yield
        self.fifo.publish()
        stopped, self._stopped = self._stopped, []
        for slot in stopped:
            self.fifo.restart(slot)
            self._start(slot)
        self._admit()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if condition():
                return
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> None:
        while self.fifo.may_admit:
            self._start(self.fifo.admit())

    def _start(self, slot: int) -> None:
        task = self._tasks[slot] = asyncio.ensure_future(self._play(slot))
        task.add_done_callback(lambda done: self._done(slot, done))

    def _done(self, slot: int, task: asyncio.Task[T]) -> None:
        if self._tasks.pop(slot, None) is None or task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failure = self._failure or error
        else:
            self.outcomes[slot] = task.result()
            self.fifo.finish(slot)
        self._changed.set()
