"""The floor: the same requests by a bare aiohttp client, with prepared ids, the standard library's JSON, no template, no parsing and no record."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from benchmarks.overhead.assets import load
from benchmarks.overhead.meter import METER


async def run(address: str, episodes: int, turns: int, concurrency: int) -> dict[str, Any]:
    """All episodes, measured."""
    assets = load()
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def post(body: dict[str, Any]) -> Any:
        async with session.post(f"{address}/generate", json=body) as answer:
            return json.loads(await answer.read())

    async def episode() -> tuple[list[int], list[int], list[float]]:
        ids, mask, log_probs = list(assets.prompt), [1] * 0, [0.0] * 0
        while True:
            sampling = {"temperature": 1.0, "max_new_tokens": 1024}
            answer = await post({"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
            out = answer["output_ids"]
            ids = ids + out
            mask += [1] * len(out)
            log_probs += [e[0] for e in answer["meta_info"]["output_token_logprobs"]]
            if "<answer>" in answer["text"]:
                return ids, mask, log_probs
            METER.hit()
            await asyncio.sleep(0.010)
            ids = ids + assets.observation
            mask += [0] * len(assets.observation)
            log_probs += [0.0] * len(assets.observation)

    slots = asyncio.Semaphore(concurrency)

    async def one() -> Any:
        async with slots:
            return await episode()

    await episode()  # warm
    METER.start(episodes)
    done = await asyncio.gather(*(one() for _ in range(episodes)))
    found = METER.stop(turns)
    await session.close()
    return {**found, "done": len(done)}
