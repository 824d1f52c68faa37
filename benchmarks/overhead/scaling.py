"""Throughput by the number of runner processes: one saturated process, which is the plain runner, and N of them with the same work each.

    python -m benchmarks.overhead.scaling --processes 1 2 4 --out DIR

Episodes and concurrency grow with N. Each N runs `--repeats` times, alternately, after a warm-up of each. The record is written and every
token compared as in agent.py. It prints the episodes/s as a multiple `N.NN x` of one process (medians), and how busy the processes were. The
multiple is meaningful only if the runners are the bottleneck: they should be near 1.00, controller and mocks below. It needs N + 1 + mocks
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.engine.base import Engine
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.reward import Scorer
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.process_pool import ProcessPool
from agentrl.rollout.rollout import Rollout, RolloutLimits, Runner
from agentrl.store import EpisodeWriter
from benchmarks.overhead import agent
from benchmarks.overhead.assets import CONTEXT, MODEL, load
from benchmarks.overhead.processes import Mock

Run = dict[str, Any]


def fleet(addresses: list[str]) -> Fleet:
    """All mocks behind one engine."""
    return Fleet([Member(SGLangEngine(a, model_dir=MODEL, context_length=CONTEXT)) for a in addresses])


def maker(addresses: list[str], turns: int) -> Callable[[Any, Any], tuple[EpisodeRunner, Engine]]:
    """What a runner process makes its runners with."""
    renderer = agent.make_agent_renderer()

    def make(settings: Any, tell: Any) -> tuple[EpisodeRunner, Engine]:
        engine = fleet(addresses)
        engine.attach(0)
        return agent.make_runner(addresses[0], renderer, turns, engine=engine), engine

    return make


@contextlib.asynccontextmanager
async def in_this_process(addresses: list[str], turns: int) -> AsyncIterator[Runner]:
    """The plain runner."""
    engine = fleet(addresses)
    await engine.start()
    runner = agent.make_runner(addresses[0], agent.make_agent_renderer(), turns, engine=engine)
    try:
        yield runner
    finally:
        await engine.close()
        runner.close()


def children_cpu_s() -> float:
    """CPU seconds of all live runner processes."""
    ticks = 0
    for process in multiprocessing.active_children():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """CPU seconds of this process alone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def mocks_cpu_s(addresses: list[str]) -> list[float]:
    """CPU seconds of each mock."""
    return [json.loads(urllib.request.urlopen(f"{a}/stats", timeout=10).read())["cpu_s"] for a in addresses]


async def measure(
    runner: Runner, addresses: list[str], episodes: int, turns: int, concurrency: int, processes: int
) -> Run:
    """One run."""
    folder = Path(tempfile.mkdtemp())
    writer = EpisodeWriter(folder)
    mocks = await asyncio.to_thread(mocks_cpu_s, addresses)
    own, children, started = own_cpu_s(), children_cpu_s(), time.perf_counter()
    groups, table = await Rollout(runner, RolloutLimits(concurrency=concurrency)).run(
        agent.specs(episodes), progress=writer.write
    )
    wall = time.perf_counter() - started
    own, children = own_cpu_s() - own, children_cpu_s() - children
    mocks = [after - m for after, m in zip(await asyncio.to_thread(mocks_cpu_s, addresses), mocks, strict=True)]
    writer.close()
    trajectories = [t for g in groups for t in g.trajectories]
    checked = agent.check(trajectories, folder, turns)
    shutil.rmtree(folder)
    if len(trajectories) != episodes or checked["wrong"] or checked["violations"] or checked["recorded"] != episodes:
        raise RuntimeError(f"{len(trajectories)} of {episodes} episodes, {checked}\n{table}")
    return {
        "episodes_per_s": episodes / wall,
        "wall_s": wall,
        "cpu_ms_per_turn": (own + children) / (episodes * turns) * 1e3,
        "runners_busy": (children or own) / wall / processes,
        "controller_busy": own / wall,
        "mocks_busy": max(mocks) / wall,
    }


async def run(
    args: argparse.Namespace, addresses: list[str], keep: Callable[[dict[int, list[Run]]], None]
) -> dict[int, list[Run]]:
    """All of them, in turns; after each turn `keep` is given what there is."""
    found: dict[int, list[Run]] = {n: [] for n in args.processes}
    make = partial(maker, addresses, args.turns)
    several = {n: ProcessPool(make, n, Scorer(()), on_notice=lambda notice: None) for n in args.processes if n > 1}
    try:
        for repeat in range(args.repeats + 1):
            for n in args.processes:
                episodes, concurrency = n * args.episodes, n * args.concurrency
                part = several[n].rollout(None) if n > 1 else in_this_process(addresses, args.turns)
                async with part as runner:
                    one = await measure(runner, addresses, episodes, args.turns, concurrency, n)
                if repeat:
                    found[n].append(one)
                    print(f"  {n} processes: {one['episodes_per_s']:.0f} episodes/s", file=sys.stderr, flush=True)
            if repeat:
                keep(found)
    finally:
        for processes in several.values():
            await processes.close()
    return found


def table(found: dict[int, list[Run]]) -> str:
    """As Markdown, the growth as 'N.NN x'."""
    keys = ("episodes_per_s", "cpu_ms_per_turn", "runners_busy", "controller_busy", "mocks_busy")
    rows = ["| processes | episodes/s | scaling | min..max | CPU ms/turn | each runner | controller | busiest mock |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    first = statistics.median(r["episodes_per_s"] for r in next(iter(found.values())))
    for n, runs in found.items():
        rate, cpu, runners, controller, mocks = (statistics.median(r[k] for r in runs) for k in keys)
        rates = [r["episodes_per_s"] for r in runs]
        rows.append(
            f"| {n} | {rate:.0f} | {rate / first:.2f} x | {min(rates):.0f}..{max(rates):.0f} | {cpu:.3f} "
            f"| {runners:.2f} | {controller:.2f} | {mocks:.2f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--episodes", type=int, default=2048, help="for each process")
    parser.add_argument("--concurrency", type=int, default=256, help="for each process")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mocks", type=int, help="mock engines (default: half as many as processes, and one more)")
    parser.add_argument("--out", type=Path, help="folder for scaling.json and scaling.md")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        count = args.mocks or math.ceil(max(args.processes) / 2) + 1
        machine = (
            f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
            f"{count} mock engines, vocabulary {load().vocabulary}, load {os.getloadavg()[0]:.1f}"
        )
        addresses = [stack.enter_context(Mock(args.turns)).address for _ in range(count)]
        found = asyncio.run(run(args, addresses, lambda so_far: write(args, machine, so_far)))
    print(f"{machine}\n\n{table(found)}")


def write(args: argparse.Namespace, machine: str, found: dict[int, list[Run]]) -> None:
    """To `--out`, so that a run that is cut off leaves what it had."""
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    content = {"machine": machine, "settings": settings, "found": found}
    (args.out / "scaling.json").write_text(json.dumps(content, indent=1) + "\n")
    (args.out / "scaling.md").write_text(f"# Scaling with runner processes\n\n{machine}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
