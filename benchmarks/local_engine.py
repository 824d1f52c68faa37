"""Tokens per second of the local engine: sampling at several loads, prefill, and whether the results stay bit-equal.

    python benchmarks/local_engine.py [--model DIR] [--loads 1,7,64,128] [--threads N]

Each request has a context of 100 to 400 tokens and samples 16. "sampling" counts sampled tokens over the time from the first to the
last of them, with the contexts already computed. "episodes" counts them over three turns with 100 to 200 inserted tokens between, all included.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from agentrl.engine.base import Generation, SamplingParams
from agentrl.engine.local.engine import LocalEngine


def build_model(folder: Path) -> None:
    """A random Qwen3 of 3.7M parameters, the size of the project's small models."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Load:
    """Concurrent episodes on one engine."""

    def __init__(self, engine: LocalEngine, size: int) -> None:
        self.engine = engine
        self.size = size
        draw = random.Random(0)
        self.contexts = [[draw.randrange(2000) for _ in range(draw.randrange(100, 400))] for _ in range(size)]
        self.deltas = [[draw.randrange(2000) for _ in range(draw.randrange(100, 200))] for _ in range(2 * size)]

    async def generate(self, i: int, ids: list[int], new: int) -> Generation:
        params = SamplingParams(new, seed=i, ignore_eos=True)
        return await self.engine.generate(ids, params, session=str(i))

    async def episode(self, i: int) -> list[Generation]:
        ids = list(self.contexts[i])
        turns = []
        for turn in range(3):
            turns.append(await self.generate(i, ids, 16))
            ids += [*turns[-1].ids, *self.deltas[(2 * i + turn) % len(self.deltas)]]
        await self.engine.release(str(i))
        return turns

    async def sampling(self, new: int = 16) -> float:
        """Sampled tokens per second without prefill: a first generation has cached the contexts."""
        async with asyncio.TaskGroup() as group:
            warm = [group.create_task(self.generate(i, self.contexts[i], 1)) for i in range(self.size)]
        longer = [[*self.contexts[i], *t.result().ids] for i, t in enumerate(warm)]
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i in range(self.size):
                group.create_task(self.generate(i, longer[i], new))
        seconds = time.perf_counter() - start
        for i in range(self.size):
            await self.engine.release(str(i))
        return self.size * new / seconds

    async def prefill(self) -> float:
        """Context tokens per second, each context followed by one sampled token."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i in range(self.size):
                group.create_task(self.generate(i, self.contexts[i], 1))
        seconds = time.perf_counter() - start
        for i in range(self.size):
            await self.engine.release(str(i))
        return sum(map(len, self.contexts)) / seconds

    async def episodes(self) -> tuple[float, list[list[Generation]]]:
        """Sampled tokens per second over whole episodes, and their generations."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.episode(i)) for i in range(self.size)]
        seconds = time.perf_counter() - start
        turns = [t.result() for t in tasks]
        return sum(len(g.ids) for t in turns for g in t) / seconds, turns


async def measure(model: Path, loads: list[int], threads: int | None, repeats: int) -> None:
    engine = LocalEngine(model, max_running=max(loads), threads=threads)
    await engine.start()
    print(await engine.health())
    lowest = 0.0
    print(
        f"{'requests':>8} {'sampling tok/s':>15} {'ratio':>6} {'prefill tok/s':>14} {'episodes tok/s':>15}  bit-exact"
    )
    for size in loads:
        load = Load(engine, size)
        sampling = max([await load.sampling() for _ in range(repeats)])
        prefill = max([await load.prefill() for _ in range(repeats)])
        rates = [await load.episodes() for _ in range(repeats)]
        lowest = lowest or sampling
        alone = await Load(engine, size).episode(0)
        exact = all(turns[0] == alone for _, turns in rates)
        fastest = max(rate for rate, _ in rates)
        print(f"{size:8d} {sampling:15.0f} {sampling / lowest:6.1f} {prefill:14.0f} {fastest:15.0f}  {exact}")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="model folder (default: a small Qwen3 with random weights)"
    )
    parser.add_argument(
        "--loads", default="1,7,64,128", metavar="N,N,…", help="concurrent requests (default: 1,7,64,128)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="measurements, of which the fastest is printed (default: 3)"
    )
    args = parser.parse_args()
    loads = [int(load) for load in args.loads.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            build_model(Path(folder))
        asyncio.run(measure(args.model or Path(folder), loads, args.threads, args.repeats))


if __name__ == "__main__":
    main()
