"""The cost of a sandbox: `python benchmarks/sandbox.py [--write]`.

It measures the wall time of a call in a sandbox that runs already, of a sandbox from its start to its end with one call, and the calls per minute of
episodes with four calls each, eight at a time, for each backend that this machine has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from result_record import result_record

from agentrl.sandbox import Backend, Namespaces, ProcessLimits, Sandbox

RESULTS = Path(__file__).parent / "results" / "sandbox_cpu.json"
CALLS_PER_EPISODE = 4
CONCURRENCY = 8
CODE = "sum(range(1000))"


async def measure(backend: Backend, calls: int, episodes: int) -> dict[str, float]:
    """Medians in milliseconds, and calls per minute."""
    warm: list[float] = []
    async with Sandbox(backend=backend) as sandbox:
        await sandbox.python(CODE)
        for _ in range(calls):
            started = time.perf_counter()
            await sandbox.python(CODE)
            warm.append(time.perf_counter() - started)
    lives: list[float] = []
    slots = asyncio.Semaphore(CONCURRENCY)

    async def episode(count: int) -> None:
        async with slots:
            started = time.perf_counter()
            async with Sandbox(backend=backend) as sandbox:
                for _ in range(count):
                    await sandbox.python(CODE)
            lives.append(time.perf_counter() - started)

    for _ in range(10):
        await episode(1)
    alone = median(lives)
    started = time.perf_counter()
    await asyncio.gather(*(episode(CALLS_PER_EPISODE) for _ in range(episodes)))
    rate = 60 * episodes * CALLS_PER_EPISODE / (time.perf_counter() - started)
    return {"call_ms": 1000 * median(warm), "sandbox_ms": 1000 * alone, "calls_per_minute": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--episodes", type=int, default=250)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results/sandbox_cpu.json")
    args = parser.parse_args()
    backends: list[Backend] = [b for b in (Namespaces(), ProcessLimits()) if b.why_not() is None]
    results = {b.name: asyncio.run(measure(b, args.calls, args.episodes)) for b in backends}
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    command = f"python benchmarks/sandbox.py --calls {args.calls} --episodes {args.episodes}"
    rows = [
        result_record(
            f"{key}, {name}", round(value, 2), 1000 if key == "calls_per_minute" else None, command, machine=load
        )
        for name, measured in results.items()
        for key, value in measured.items()
    ]
    text = json.dumps(rows, indent=1)
    print(text)
    if args.write:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
