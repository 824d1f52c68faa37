"""Synchronous, one-step-off and asynchronous training on a mock engine, with the real loop on a virtual clock.

    python benchmarks/async_training.py            the table, and benchmarks/results/async_training.json
    python benchmarks/async_training.py --simulate the window with 1,000 engines and 100,000 episodes, and what it costs

The workload is fixed: episodes of 6 turns with 5 tool calls, tools with lognormal latency of median 2 s and sigma 1.0, generations of 0.5 s on an
engine with 64 slots, and a trainer with separate resources that takes 18 s for a rollout of 16 groups of 8 and 1 s for a weight update.
Everything but engine, tools and trainer is the code of `agentrl train`. The clock is virtual, so the machine's load changes nothing.

The ceiling: work is conserved, so no schedule can be faster than the busier of trainer and engine. It is the synchronous seconds per rollout
divided by the busier one's seconds of work per rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from result_record import result_record

from agentrl import Task, ToolEnv, reward, tool
from agentrl.config import build_config
from agentrl.engine.scripted import ScriptedEngine
from agentrl.run.components import Components
from agentrl.run.training import train
from agentrl.schedule.pipeline import Pipeline
from agentrl.schedule.virtual_clock import run_virtual, spend
from agentrl.schedule.window import Pace, WindowedFifo
from agentrl.store import read_records

GROUPS, MEMBERS, TURNS = 16, 8, 6
TOOL_MEDIAN_S, TOOL_SIGMA = 2.0, 1.0
GENERATION_S, SLOTS = 0.5, 64
TRAIN_S, SYNC_S = 18.0, 1.0
ROLLOUTS, WARM_UP = 12, 2
RESULT = Path(__file__).parent / "results" / "async_training.json"
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"schedule": "one_step_off"},
    "async": {"schedule": "async", "async_buffer_size": 4 * GROUPS, "consumption_window": GROUPS},
}


def tool_latency(key: str) -> float:
    """Seconds of one tool call, the same in every schedule."""
    return random.Random(key).lognormvariate(np.log(TOOL_MEDIAN_S), TOOL_SIGMA)


@reward
async def parity(trajectory: Any) -> float:
    """Scores that differ within a group."""
    return float(trajectory.index % 2)


class SlowTools(ToolEnv):
    """An environment whose tool has a long tail."""

    action_format = "hermes"
    shows_tools = True
    rewards = (parity,)

    @classmethod
    def tasks(cls, split: str) -> list[Task]:
        return [Task(f"{split}{i}", f"question {i}") for i in range(64)]

    @tool(timeout_s=3600, max_concurrency=4096)
    async def look(self, query: str) -> str:
        """Look something up."""
        await asyncio.sleep(tool_latency(query))
        return "nothing"


class MockEngine(ScriptedEngine):
    """Generations that take their time on a limited number of slots."""

    def __init__(self, components: Components) -> None:
        tokenizer = components.tokenizer
        super().__init__(self._says, encode=tokenizer.encode, decode=tokenizer.decode, end_id=2, delay_s=GENERATION_S)
        self._keep_interrupted = True
        self._free = asyncio.Semaphore(SLOTS)
        self.busy_s = 0.0

    @staticmethod
    def _says(request: Any) -> str:
        if request.number == TURNS - 1:
            return "done"
        query = f"{request.session.partition('-')[0]} {request.number}"
        return f'<tool_call>{{"name": "look", "arguments": {{"query": "{query}"}}}}</tool_call>'

    async def generate(self, *args: Any, **options: Any) -> Any:
        async with self._free:
            self.busy_s += GENERATION_S
            return await super().generate(*args, **options)


class MockTrainer:
    """Takes its time."""

    copies, micro_batch_tokens, micro_batch_rows, multiple, tree_packing = 1, 1 << 14, None, 1, False

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps_at: list[float] = []

    def step(self, rows: Any, loss: Any, lr: float) -> dict[str, Any]:
        spend(TRAIN_S)
        self.steps_at.append(asyncio.get_running_loop().time())
        return {"loss": 0.0, "grad_norm": 1.0, "log_probs": [r.rollout_log_probs for r in rows]}

    def log_probs(self, rows: Any, **_: Any) -> list[Any]:
        return [r.rollout_log_probs for r in rows]

    def export_weights(self, path: Path) -> None:
        spend(SYNC_S)
        path.mkdir(parents=True)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)

    def close(self) -> None: ...


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train with one schedule; returns its seconds per rollout after the first ones, and what became of its episodes."""
    made: dict[str, Any] = {}

    def mock_engine(components: Components, *_: Any) -> MockEngine:
        made["engine"] = MockEngine(components)
        return made["engine"]

    def mock_trainer(*_: Any, **__: Any) -> MockTrainer:
        made["trainer"] = MockTrainer()
        return made["trainer"]

    async def nothing(*_: Any) -> None: ...

    Components.engine, Components.trainer = mock_engine, mock_trainer  # type: ignore[method-assign, assignment]
    Components.require_env, Components.require_trainable = nothing, lambda self: None  # type: ignore[method-assign, assignment]
    settings = {
        "run": str(folder / name),
        "env": f"{__file__}:SlowTools",
        "hf_checkpoint": "search_r1_3m",
        "num_rollout": ROLLOUTS,
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": MEMBERS,
        "max_turns": TURNS,
        "concurrency": 4096,
        "episode_timeout_s": 36000.0,
        "eval_interval": 0,
        "tensorboard": False,
        "use_tis": True,
        "save_interval": ROLLOUTS,
        **SCHEDULES[name],
    }
    path = run_virtual(train(build_config(settings), echo=lambda _: None))
    at = made["trainer"].steps_at
    records = [r for r in read_records(path / "episodes") if r.get("split") == "train"]
    staleness = Counter(r["schedule"]["staleness"] for r in records if "schedule" in r)
    return {
        "seconds_per_rollout": (at[-1] - at[WARM_UP - 1]) / (len(at) - WARM_UP),
        "engine_busy_s": made["engine"].busy_s / SLOTS / ROLLOUTS,
        "episodes": len(records),
        "dropped": ROLLOUTS * GROUPS * MEMBERS - len(records),
        "stop_reasons": dict(Counter(r["stop_reason"] for r in records)),
        "interrupted": sum(_versions(r) > 1 for r in records),
        "staleness": {str(k): n for k, n in sorted(staleness.items())},
    }


def _versions(record: dict[str, Any]) -> int:
    return len({s.get("policy_version") for seg in record["segments"] for s in seg["spans"]} - {None})


def redundancy(start: float) -> dict[str, float]:
    """Synchronous training that starts `start` times the groups and keeps the first to finish; the rest is dropped."""
    seconds, kept_mean, all_mean = [], [], []
    for rollout in range(ROLLOUTS):
        first = rollout * round(GROUPS * start) * MEMBERS
        groups = []
        for g in range(round(GROUPS * start)):
            members = [first + g * MEMBERS + m for m in range(MEMBERS)]
            times = [
                TURNS * GENERATION_S + sum(tool_latency(f"{i} {turn}") for turn in range(TURNS - 1)) for i in members
            ]
            groups.append((max(times), fmean(times)))
        groups.sort()
        seconds.append(groups[GROUPS - 1][0] + TRAIN_S + SYNC_S)
        kept_mean.append(fmean(mean for _, mean in groups[:GROUPS]))
        all_mean.append(fmean(mean for _, mean in groups))
    bias = fmean(kept_mean) / fmean(all_mean) - 1
    return {"seconds_per_rollout": fmean(seconds), "length_bias": bias, "dropped_share": 1 - 1 / start}


def compare() -> int:
    """Measure all schedules, print the table and write the record; returns the exit status."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(name, Path(folder)) for name in SCHEDULES}
    extra = {f"redundancy {start}": redundancy(start) for start in (1.25, 1.5)}
    base = results["sync"]["seconds_per_rollout"]
    work = max(TRAIN_S + SYNC_S, results["sync"]["engine_busy_s"])
    ceiling = base / work
    pace = Pace(batch=GROUPS, buffer=4 * GROUPS, window=GROUPS)
    print(f"synchronous: {base:.1f} s per rollout, {work:.1f} s of them the busier resource: ceiling {ceiling:.2f}")
    for name, result in {**results, **extra}.items():
        gain = base / result["seconds_per_rollout"]
        notes = (
            f"dropped {result['dropped']}"
            if "dropped" in result
            else f"drops {result['dropped_share']:.0%} of the groups"
        )
        if "length_bias" in result:
            notes += f", kept episodes are {-result['length_bias']:.1%} shorter"
        if result.get("staleness"):
            notes += f", staleness {result['staleness']}, {result['interrupted']} episodes of several versions"
        print(
            f"{name:>16}  {result['seconds_per_rollout']:6.1f} s  {gain:4.2f}x  {gain / ceiling:4.0%} of the ceiling  {notes}"
        )
    gain = base / results["async"]["seconds_per_rollout"]
    stalest = max(map(int, results["async"]["staleness"]))
    checks = {
        "ceiling at least 3.75": ceiling >= 3.75,
        "asynchronous at least 3 x": gain >= 3,
        "at least 80 % of the ceiling": gain >= 0.8 * ceiling,
        "no episode dropped": results["async"]["dropped"] == 0,
        f"staleness at most {pace.max_staleness}": stalest <= pace.max_staleness,
    }
    write_record(
        "async_training_speedup", gain, ceiling, {"schedules": {**results, **extra}, "bound": pace.max_staleness}
    )
    for what, holds in checks.items():
        print("yes" if holds else "NO ", what)
    return 0 if all(checks.values()) else 1


async def _simulate(engines: int, groups: int, latencies: list[float]) -> tuple[float, float, int]:
    """The window over `groups` groups; returns its own CPU seconds, the virtual seconds and the largest staleness."""
    pace = Pace(batch=128, buffer=512, window=128)
    fifo = WindowedFifo(pace, groups - groups % pace.batch)
    free = asyncio.Semaphore(engines * SLOTS // MEMBERS)
    chance = random.Random(0)

    async def play(slot: int) -> int:
        async with free:
            await asyncio.sleep(max(chance.choice(latencies) for _ in range(MEMBERS)))
        return slot

    spent, stalest = _timed(fifo), 0
    async with Pipeline(fifo, play) as pipeline:
        while fifo.rollouts * pace.batch < fifo.total:
            stalest = max(stalest, max(t.staleness for t in await pipeline.take()))
            await asyncio.sleep(TRAIN_S)
            async with pipeline.publishing():
                await asyncio.sleep(SYNC_S)
    assert stalest <= pace.max_staleness
    return spent[0], asyncio.get_running_loop().time(), stalest


def _timed(fifo: WindowedFifo) -> list[float]:
    """Count the CPU time of the window's methods from now on."""
    spent = [0.0]

    def timed(method: Any) -> Any:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent[0] += time.perf_counter() - started

        return call

    for name in ("admit", "finish", "take", "publish"):
        setattr(fifo, name, timed(getattr(fifo, name)))
    return spent


def simulate() -> int:
    """1,000 engines and 100,000 episodes: the cost of the window and of the pipeline for each episode."""
    latencies = [
        TURNS * GENERATION_S + sum(tool_latency(f"{i} {turn}") for turn in range(TURNS - 1)) for i in range(2000)
    ]
    groups = 100_000 // MEMBERS
    started = time.process_time()
    window_s, virtual_s, stalest = run_virtual(_simulate(1000, groups, latencies))
    total_s = time.process_time() - started
    per_episode = total_s / (groups * MEMBERS)
    print(
        f"{groups * MEMBERS} episodes on 1000 engines in {virtual_s:.0f} virtual s: {total_s:.2f} s of CPU, {1e6 * per_episode:.1f} us per "
        f"episode with the event loop, {1e6 * window_s / (groups * MEMBERS):.2f} us in the window; stalest {stalest} rollouts"
    )
    return 0


def write_record(metric: str, value: float, baseline: float, details: dict[str, Any]) -> None:
    """The result beside the others. `baseline` is the ceiling."""
    command = "python benchmarks/async_training.py"
    record = result_record(metric, round(value, 3), round(baseline, 3), command, clock="virtual", **details)
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="simulate 1,000 engines and 100,000 episodes")
    return simulate() if parser.parse_args().simulate else compare()


if __name__ == "__main__":
    sys.exit(main())
