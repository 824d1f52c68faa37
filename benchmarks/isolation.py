"""The cost of a separate process: `python benchmarks/isolation.py [--write]`.

It measures wall time per call and per environment, one after the other, in a thread and in a process: a sync `step` that returns at once, and
an environment from its constructor to its end. Medians; other work on the machine adds to both.
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

from agentrl import Env, StepResult, Task
from agentrl.rollout.env_instance import EnvInstance, ThreadPools
from agentrl.tool import Isolation
from agentrl.types import Action, FinishReason

RESULTS = Path(__file__).parent / "results" / "isolation_cpu.json"
ACTION = Action("x" * 200, (), (), FinishReason.STOP)


class Quick(Env):
    """Does nothing, in a thread or in a process."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, action: Action) -> StepResult:
        """Return 200 characters."""
        self.steps += 1
        return StepResult(action.text)


async def measure(isolation: Isolation, calls: int, episodes: int) -> dict[str, float]:
    """Median milliseconds of a call, and of an environment's whole life with one call."""
    pools = ThreadPools(Quick, isolation=isolation)
    steps: list[float] = []
    lives: list[float] = []
    try:
        for number in range(episodes):
            started = time.perf_counter()
            instance = EnvInstance(Quick, Quick, pools)
            await instance.create(number)
            await instance.call("reset", Task("t", "Go on."), seed=number)
            for _ in range(calls if number == 0 else 1):
                before = time.perf_counter()
                await instance.call("step", ACTION)
                steps.append(time.perf_counter() - before)
            await instance.close()
            if number:
                lives.append(time.perf_counter() - started)
    finally:
        pools.close()
        pools.end_processes()
    return {"call_ms": 1000 * median(steps), "environment_ms": 1000 * median(lives)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results/isolation_cpu.json")
    args = parser.parse_args()
    here = asyncio.run(measure("thread", args.calls, args.episodes))
    own = asyncio.run(measure("process", args.calls, args.episodes))
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    command = f"python benchmarks/isolation.py --calls {args.calls} --episodes {args.episodes}"
    rows = [
        result_record(
            f"{key}, isolation process",
            round(own[key], 3),
            {"isolation thread": round(here[key], 3)},
            command,
            machine=load,
        )
        for key in own
    ]
    text = json.dumps(rows, indent=1)
    print(text)
    if args.write:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
