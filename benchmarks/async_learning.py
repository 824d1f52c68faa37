"""Does asynchronous training learn as well as synchronous? search_r1 with slow tools, three seeds each, on the CPU.

    python benchmarks/async_learning.py                       six runs at once, for 16 cores
    python benchmarks/async_learning.py --jobs 1              one after the other, for a small machine

Each run is `agentrl train` on the embedded policy with the settings of the example. A search takes lognormal time, median `--latency` seconds and
sigma 1.0; the same draw for the same episode and call in every run. Writes benchmarks/results/async_learning.json and async_learning.png:
exact match on 200 held-out questions at equal numbers of episodes, and over wall time. The exit status is 1 if the mean final exact match of
the asynchronous runs is more than 0.03 below that of the synchronous ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

from result_record import result_record

from agentrl.envs.search_r1 import SearchR1
from agentrl.tool import tool
from agentrl.types import Message, Task

RESULTS = Path(__file__).parent / "results"
SETTINGS = Path(__file__).parents[1] / "envs" / "search_r1.toml"
SIGMA = 1.0
TOLERANCE = 0.03
SCHEDULES = {"sync": [], "async": ["--schedule", "async", "--use-tis"]}
EVALUATION = re.compile(r"^eval test after (\d+) rollouts:.*?\bem ([0-9.]+)")


class SlowSearch(SearchR1):
    """search_r1 whose search takes time."""

    name = "slow_search_r1"

    def __init__(self, latency: float = 0.15, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._latency = latency
        self._random = random.Random(0)

    def reset(self, task: Task, *, seed: int) -> list[Message]:
        """See `SearchR1.reset`."""
        self._random = random.Random(seed)
        return super().reset(task, seed=seed)

    @tool(retries=2, timeout_s=120)
    async def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: what to look for
        """
        await asyncio.sleep(self._random.lognormvariate(log(self._latency), SIGMA))
        return await asyncio.to_thread(super().search, query)


def run(schedule: str, seed: int, folder: Path, latency: float, rollouts: int) -> dict[str, Any]:
    """Train once; returns the evaluations as (rollouts, seconds, exact match)."""
    target = folder / f"{schedule}-{seed}"
    words = ["--config", str(SETTINGS), "--env", f"{__file__}:SlowSearch", "--env-arg", f"latency={latency}"]
    words += ["--run", str(target), "--seed", str(seed), "--num-rollout", str(rollouts), *SCHEDULES[schedule]]
    command = [sys.executable, "-m", "agentrl.cli", "train", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    evaluations, started = [], time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("eval ", "rollout", "groups by", "of ")):
                print(f"{schedule} seed {seed}: {line.rstrip()}", flush=True)
            if match := EVALUATION.search(line):
                evaluations.append((int(match[1]), round(time.perf_counter() - started, 1), float(match[2])))
    if process.returncode:
        raise SystemExit(f"{schedule} seed {seed} ended with status {process.returncode}; see {target}/run.log")
    summary = json.loads((target / "summary.json").read_text())
    names = ("eval_em_last", "episodes", "exactness_violations", "rollout_s", "train_s", "sync_s", "wall_s")
    return {"schedule": schedule, "seed": seed, "evaluations": evaluations, **{name: summary[name] for name in names}}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Exact match over rollouts and over wall time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, column, label in ((axes[0], 0, "rollouts (128 episodes each)"), (axes[1], 1, "seconds")):
        for result in runs:
            style = {"color": {"sync": "tab:blue", "async": "tab:orange"}[result["schedule"]], "marker": "."}
            if result["seed"] == runs[0]["seed"]:
                style["label"] = result["schedule"]
            axis.plot([e[column] for e in result["evaluations"]], [e[2] for e in result["evaluations"]], **style)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("exact match, 200 held-out questions")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--latency", type=float, default=0.15, help="median seconds of a search")
    parser.add_argument("--jobs", type=int, help="runs at the same time (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--keep", type=Path, help="folder of the runs (default: a temporary one)")
    args = parser.parse_args()
    wanted = [(schedule, seed) for seed in args.seeds for schedule in SCHEDULES]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs or len(wanted)) as pool:
        folder = args.keep or Path(temporary)
        runs = list(pool.map(lambda w: run(*w, folder, args.latency, args.rollouts), wanted))
    final = {s: fmean(r["eval_em_last"] for r in runs if r["schedule"] == s) for s in SCHEDULES}
    wall = {s: fmean(r["wall_s"] for r in runs if r["schedule"] == s) for s in SCHEDULES}
    args.out.mkdir(parents=True, exist_ok=True)
    draw(runs, args.out / "async_learning.png")
    details = {
        "tolerance": TOLERANCE, "seconds": wall, "speedup": round(wall["sync"] / wall["async"], 3),
        "latency_median_s": args.latency, "cores": os.cpu_count(), "runs": runs,
    }  # fmt: skip
    command = "python benchmarks/async_learning.py"
    record = result_record("async_final_em", round(final["async"], 4), round(final["sync"], 4), command, **details)
    (args.out / "async_learning.json").write_text(json.dumps(record, indent=2) + "\n")
    print(
        f"final exact match: async {final['async']:.3f}, sync {final['sync']:.3f}; wall {wall['async']:.0f} s and {wall['sync']:.0f} s "
        f"({details['speedup']}x)"
    )
    return 0 if final["async"] >= final["sync"] - TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
