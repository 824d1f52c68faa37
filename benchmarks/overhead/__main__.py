"""The table: agentrl's runner and a raw client as the floor. Both do the same work with the same mock engine, alternately; medians are reported.

    python -m benchmarks.overhead [--repeats 5] [--quick] [--write] [--raw-script FILE]

`--raw-script` adds another raw client, alternately and with the same mock, to compare the two floors.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.overhead.assets import load
from benchmarks.overhead.processes import Mock, Process, Script
from benchmarks.overhead.results import keep

CASES = ((512, 4, 64), (512, 4, 256), (64, 32, 64))
"""episodes, turns, at once"""
CLIENTS = {
    "raw": ("floor",),
    "agentrl": ("agent",),
    "agentrl+uvloop": ("agent", "--uvloop"),
    "agentrl --schedule async": ("agent", "--windowed"),
    "agentrl, no text twice": ("agent", "--new-documents"),
}
Runs = list[dict[str, Any]]


def main() -> None:
    """Measure, print, and with `--write` keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat of the first case")
    parser.add_argument("--write", action="store_true", help="keep in benchmarks/results/overhead_cpu.{json,md}")
    parser.add_argument(
        "--raw-script", type=Path, metavar="FILE", help="a raw client to compare ours with; see processes.Script"
    )
    parser.add_argument("--raw-variant", default="aiohttp", help="its --variant")
    parser.add_argument("--raw-response-id", type=int, default=151665, help="its token <tool_response>")
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=list(CLIENTS))
    args = parser.parse_args()
    load()
    repeats, cases = (1, CASES[:1]) if args.quick else (args.repeats, CASES)
    found = {f"{e}x{t}@{c}": measure(e, t, c, repeats, args) for e, t, c in cases}
    text = "\n\n".join(table(name, runs) for name, runs in found.items())
    print(text)
    if args.write:
        section = "per turn" if args.raw_script is None else f"the floor beside {args.raw_script.name}"
        keep(section, shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]]), found, text)


def measure(episodes: int, turns: int, concurrency: int, repeats: int, args: argparse.Namespace) -> dict[str, Runs]:
    """All clients in turns, `repeats` times, after one run of each that does not count."""
    with Mock(turns, 50, 0.0, f"--response-id={args.raw_response_id}") as mock:
        workers: dict[str, Process | Script] = {name: Process("worker", *CLIENTS[name]) for name in args.clients}
        if args.raw_script is not None:
            workers["raw script"] = Script(args.raw_script, args.raw_variant)
        runs: dict[str, Runs] = {name: [] for name in workers}
        try:
            for i in range(repeats + 1):
                for name, worker in workers.items():
                    before = mock.stats()["cpu_s"]
                    run = worker.ask(address=mock.address, episodes=episodes, turns=turns, concurrency=concurrency)
                    run["mock_cpu_s"] = mock.stats()["cpu_s"] - before
                    if i:
                        runs[name].append(run)
                        _complain(name, run, episodes)
        finally:
            for worker in workers.values():
                worker.__exit__(None, None, None)
    return runs


def _complain(name: str, run: dict[str, Any], episodes: int) -> None:
    bad = {k: run[k] for k in ("wrong", "violations", "tasks_left") if run.get(k)}
    if bad or run["done"] != episodes:
        raise RuntimeError(f"{name}: {run['done']} of {episodes} episodes, {bad}\n{run.get('causes')}")


def _growth(runs: Runs, turns: int) -> float:
    """How many times the CPU of turn 4 the last but one takes, by medians over runs of the means of three rounds; 0 for few turns."""
    if turns < 32:
        return 0.0
    early = statistics.median(statistics.fmean(r["rounds_ms"][2:5]) for r in runs)
    late = statistics.median(statistics.fmean(r["rounds_ms"][turns - 4 : turns - 1]) for r in runs)
    return late / early


def table(name: str, runs: dict[str, Runs]) -> str:
    """One case as a Markdown table, agentrl's ratios as 'N.NN x raw'."""
    turns = int(name.split("x")[1].split("@")[0])
    rows = [f"**{name.replace('x', ' episodes x ').replace('@', ' turns, ')} at once**\n"]
    rows.append(
        "| client | its CPU ms/turn | min..max | CPU | mock's CPU s | episodes/s | throughput | wall s | peak MB | grown MB | turn 4 -> 32 |"
    )
    rows.append("|---|---|---|---|---|---|---|---|---|---|---|")
    raw_cpu, raw_eps = _median(runs["raw"], "cpu_ms_per_turn"), _median(runs["raw"], "episodes_per_s")
    raw_growth = _growth(runs["raw"], turns)
    for client, those in runs.items():
        cpu, eps = _median(those, "cpu_ms_per_turn"), _median(those, "episodes_per_s")
        all_cpu = [r["cpu_ms_per_turn"] for r in those]
        grows = _growth(those, turns)
        rows.append(
            f"| {client} | {cpu:.3f} | {min(all_cpu):.3f}..{max(all_cpu):.3f} | {cpu / raw_cpu:.2f} x raw "
            f"| {_median(those, 'mock_cpu_s'):.2f} | {eps:.1f} | {eps / raw_eps:.2f} x raw "
            f"| {statistics.median(r['done'] / r['episodes_per_s'] for r in those):.2f} "
            f"| {_median(those, 'peak_mb'):.0f} | {_median(those, 'grown_mb'):.1f} "
            f"| {f'x {grows:.2f}, {grows / raw_growth:.2f} x raw' if grows else '-'} |"
        )
    return "\n".join(rows)


def _median(runs: Runs, key: str) -> float:
    return statistics.median(r[key] for r in runs)


if __name__ == "__main__":
    sys.exit(main())
