"""Several adapters on local engines: one engine for each, with its weights merged. A request goes to the engine of its adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Engine, EngineInfo, Generation, SamplingParams, WeightsManifest
from agentrl.errors import EngineFailure


class AdapterEngines:
    """An `Engine` of several policies that have one tokenizer and one shape.

    Args:
        engines: the engine of each adapter (`SamplingParams.adapter`).
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = dict(engines)

    async def start(self) -> None:
        """Start all; see `Engine.start`."""
        await self._each(lambda engine: engine.start())

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """See `Engine.generate`; the generation's version is that of its adapter."""
        engine = self.engines.get(sampling.adapter or "")
        if engine is None:
            raise EngineFailure(
                f"the request names the adapter {sampling.adapter!r}; the engine has {', '.join(self.engines)}",
                "unknown adapter",
            )
        return await engine.generate(ids, sampling, session=session, images=images)

    async def release(self, session: str) -> None:
        """See `Engine.release`."""
        await self._each(lambda engine: engine.release(session))

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._each(lambda engine: engine.resume())

    async def abort(self, session: str | None = None) -> None:
        """See `Engine.abort`."""
        await self._each(lambda engine: engine.abort(session))

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._each(lambda engine: engine.sleep())

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._each(lambda engine: engine.wake())

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Bring the same weights to all adapters; those of one go to its engine."""
        await self._each(lambda engine: engine.update_weights(weights, policy_version))

    async def health(self) -> EngineInfo:
        """The properties of the first engine; every engine must answer."""
        infos = await asyncio.gather(*(engine.health() for engine in self.engines.values()))
        return infos[0]

    async def close(self) -> None:
        """Stop all; see `Engine.close`."""
        await self._each(lambda engine: engine.close())

    async def _each(self, command: Callable[[Engine], Any]) -> None:
        await asyncio.gather(*(command(engine) for engine in self.engines.values()))
