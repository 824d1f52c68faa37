"""The cost of recording episodes: `python benchmarks/recording.py [--write]`.

It measures the CPU time per turn of the runner's process over HTTP, as in a run: the runner of benchmarks/overhead with its mock engine in a
separate process. Everything is on: a renderer with the whole Qwen vocabulary, Hermes tool calls, a tool that returns about 100 tokens, 64
sampled tokens a turn, masks, log-probs, versions, a reward.

One process plays the same episodes with and without the record in turn; which of the two is first alternates. After each round with the record
it is read back and compared. The two rounds of a pair lie side by side, so what else the machine does meets both: the cost is the median
of their differences, as a share of the median without the record. The quartiles of the differences are reported. The exit status is 1
above 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.overhead.processes import Mock, Process

RESULTS = Path(__file__).parent / "results" / "recording_cpu.md"
MOST_SHARE = 0.10
"""of the runner's CPU per turn"""
Pairs = list[tuple[float, float]]
"""CPU milliseconds of a turn without and with the record"""


def measure(episodes: int, turns: int, pairs: int) -> Pairs:
    """Play pairs of rounds in one worker of benchmarks/overhead."""
    with Mock(turns) as mock, Process("worker", "agent") as worker:

        def play(record: bool) -> float:
            result = worker.ask(address=mock.address, episodes=episodes, turns=turns, concurrency=64, record=record)
            if result["done"] != episodes or result["wrong"] or result["recorded"] != (episodes if record else 0):
                raise SystemExit(f"not as scripted: {result}")
            return float(result["cpu_ms_per_turn"])

        play(True)  # warm
        measured = []
        for number in range(pairs):
            order = (False, True) if number % 2 else (True, False)
            times = {record: play(record) for record in order}
            measured.append((times[False], times[True]))
        return measured


def summary(turns: int, pairs: Pairs) -> dict[str, Any]:
    """The medians, and the quartiles of the difference."""
    off, on = (list(side) for side in zip(*pairs, strict=True))
    lower, cost, upper = quantiles((b - a for a, b in pairs), n=4)
    return {
        "turns": turns,
        "off_ms": median(off),
        "on_ms": median(on),
        "cost_ms": {"lower_quartile": lower, "median": cost, "upper_quartile": upper},
        "share": cost / median(off),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| turns | CPU ms/turn without | with | the record: quartiles and median | share |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        lower, cost, upper = r["cost_ms"].values()
        lines.append(
            f"| {r['turns']} | {r['off_ms']:.3f} | {r['on_ms']:.3f} | {lower:.3f} to {upper:.3f}, {cost:.3f} | **{r['share']:.1%}** |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results/recording_cpu.{json,md}")
    args = parser.parse_args()
    rows = [summary(turns, measure(args.episodes, turns, args.pairs)) for turns in args.turns]
    print(json.dumps(rows) if args.json else table(rows))
    if args.write:
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M+00:00")
        where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
        about = f"{when}, `python benchmarks/recording.py --write`, {where}; {args.episodes} episodes, {args.pairs} pairs of rounds over HTTP."
        RESULTS.write_text("\n\n".join(["# What the record costs", about, table(rows)]) + "\n")
        RESULTS.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return int(any(r["share"] > MOST_SHARE for r in rows))


if __name__ == "__main__":
    sys.exit(main())
