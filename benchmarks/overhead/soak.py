"""A minute with every kind of failure, and a minute without: throughput, failure counts, memory.

    python -m benchmarks.overhead.soak [--seconds 60]

4-turn episodes, 256 concurrent, a tool timeout of 2 s. The tool hangs in 1 % of the calls, raises in 1 % and returns 1 MB in 1 %. The engine
drops 1 % of the connections instead of responding, alternately before the first byte and in the middle of the response.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl import Trajectory, tool
from agentrl.rollout.failures import CauseTable
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter, read_episodes
from benchmarks.overhead import agent
from benchmarks.overhead.meter import memory_kb
from benchmarks.overhead.processes import Mock
from benchmarks.overhead.results import keep

CONCURRENT = 256
SHARE = 0.01
MEGABYTE = "x word " * (1_000_000 // 7)
_random = random.Random(1)


class Clean(agent.Search):
    """The tool as it should be."""

    @tool(max_concurrency=100_000, timeout_s=2.0)
    async def search(self, query: str) -> str:
        """Search the corpus."""
        await asyncio.sleep(0.010)
        return agent.document(len(query))


class Faulty(agent.Search):
    """The tool on a bad day."""

    @tool(max_concurrency=100_000, timeout_s=2.0, max_result_bytes=4096)
    async def search(self, query: str) -> str:
        """Search the corpus."""
        dice = _random.random()
        if dice < SHARE:
            await asyncio.sleep(3600)
        if dice < 2 * SHARE:
            raise ValueError("a bad day")
        if dice < 3 * SHARE:
            return MEGABYTE
        await asyncio.sleep(0.010)
        return agent.document(len(query))


class Keeper:
    """Counts what finished, writes it, and looks at memory twice a second."""

    def __init__(self, writer: EpisodeWriter) -> None:
        self.writer = writer
        self.attempts = 0
        self.memory: list[int] = []
        self._next = 0.0

    def __call__(self, trajectory: Trajectory) -> None:
        """An attempt is over."""
        self.writer.write(trajectory)
        self.attempts += 1
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 0.5
            self.memory.append(memory_kb("VmRSS"))


async def soak(address: str, env: type[agent.Search], seconds: float, renderer: Any) -> dict[str, Any]:
    """Episode after episode in each of 256 places, for so long; what became of every one."""
    folder = Path(tempfile.mkdtemp())
    runner = agent.make_runner(address, renderer, 4, env)
    await runner.engine.start()
    keeper = Keeper(EpisodeWriter(folder))
    rollout = Rollout(runner, RolloutLimits(concurrency=CONCURRENT))
    total = CauseTable()
    numbers = itertools.count()
    issued = kept = in_time = 0
    started = time.monotonic()

    async def place() -> None:
        nonlocal issued, kept, in_time
        while time.monotonic() < started + seconds:
            groups, table = await rollout.run(agent.specs(1, next(numbers)), progress=keeper)
            issued += 1
            kept += len(groups)
            in_time += len(groups) if time.monotonic() < started + seconds else 0
            total.merge(table)

    await asyncio.gather(*(place() for _ in range(CONCURRENT)))
    wall = time.monotonic() - started
    causes = {f"{reason} {cause}".strip(): n for (reason, cause), n in total.counts.items()}
    retried = total.retried
    keeper.writer.close()
    await runner.engine.close()
    runner.close()
    recorded = sum(1 for _ in read_episodes(folder))
    shutil.rmtree(folder)
    late = keeper.memory[len(keeper.memory) // 4 :]
    half = len(late) // 2
    return {
        "episodes_per_s": in_time / seconds, "issued": issued, "kept": kept, "lost": issued - kept, "attempts": keeper.attempts, "retried": retried,
        "recorded": recorded, "accounted": keeper.attempts == sum(causes.values()) == recorded and issued == keeper.attempts - retried,
        "tasks_left": len(asyncio.all_tasks()) - 1, "engine": runner.engine.causes, "tools": runner.pools.tool_executor.counts, "causes": causes,
        "wall_s": wall,
        "memory_mb": [round(statistics.fmean(part) / 1024, 1) for part in (late[:half], late[half:]) if part],
    }  # fmt: skip


def page(found: dict[str, Any], ratio: float) -> str:
    """A line for each."""
    lines = [
        f"- {name}: {f['episodes_per_s']:.0f} episodes/s; issued {f['issued']}, kept {f['kept']}, lost {f['lost']}, retried {f['retried']}, "
        f"recorded {f['recorded']}, accounted for: {f['accounted']}; connections dropped {f['dropped']}, "
        f"engine {f['engine'] or 'never down'}; memory {' -> '.join(map(str, f['memory_mb']))} MB; {f['tools']['search']}"
        for name, f in found.items()
    ]
    return "\n".join([*lines, f"- faulty / clean: {ratio:.2f}"])


def main() -> int:
    """Both, and the ratio; status 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--write", action="store_true", help="keep in benchmarks/results/overhead_cpu.{json,md}")
    args = parser.parse_args()
    renderer = agent.make_agent_renderer()
    found = {}
    for name, env, drop in (("clean", Clean, 0.0), ("faulty", Faulty, SHARE)):
        with Mock(4, drop=drop) as mock:
            found[name] = asyncio.run(soak(mock.address, env, args.seconds, renderer))
            found[name]["dropped"] = mock.stats()["dropped"]
    ratio = found["faulty"]["episodes_per_s"] / found["clean"]["episodes_per_s"]
    print(json.dumps({**found, "ratio": ratio}, indent=1))
    if args.write:
        keep(
            "soak",
            f"python -m benchmarks.overhead.soak --seconds {args.seconds:g} --write",
            {**found, "ratio": ratio},
            page(found, ratio),
        )
    early, late = found["faulty"]["memory_mb"]
    return 0 if ratio >= 0.8 and found["faulty"]["accounted"] and late < 1.05 * early else 1


if __name__ == "__main__":
    sys.exit(main())
