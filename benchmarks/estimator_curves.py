"""search_r1 on the embedded policy by several estimators, over the tokens that they sampled. Writes benchmarks/results/estimator_curves.{json,png}.

python benchmarks/estimator_curves.py --jobs 6 [--rollouts 20] [--seed 0] [--only grpo …] [--keep FOLDER] [--out FOLDER]

Each run is `agentrl train` in processes of its own (about two cores each). Distillation waits for its teacher, the weights that grpo trained. With
branches a group has half as many episodes, so that a rollout samples about the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from result_record import result_record

HERE = Path(__file__).parent
EVAL_INTERVAL = 4
"""rollouts between two evaluations"""
SCORE = "eval/test/em"
RUNS: dict[str, list[str]] = {
    "grpo": [],
    "rloo": [],
    "ppo": ["--critic-lr", "3e-4"],
    "gigpo": ["--env", str(HERE / "keyed_search_r1.py"), "--config", str(HERE.parent / "envs" / "search_r1.toml")],
    "branch_rloo": ["--n-samples-per-prompt", "4", "--branch-at", "1", "--branch-samples", "2"],
    "distillation": ["--opd-teacher", "TEACHER"],
}
"""flags by estimator; TEACHER stands for the weights of the run of grpo"""


def flags(name: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """The flags of a run."""
    own = [word.replace("TEACHER", str(args.teacher or folder / "grpo" / "hf")) for word in RUNS[name]]
    words = [] if "--env" in own else ["--env", "search_r1"]
    words += ["--run", str(folder / name), "--advantage-estimator", name, "--seed", str(args.seed)]
    words += [
        "--num-rollout",
        str(args.rollouts),
        "--eval-interval",
        str(args.eval_interval),
        "--save-interval",
        "10000",
    ]
    return [*words, *own, *args.flags]


def run(name: str, folder: Path, args: argparse.Namespace, teacher: Future[Any] | None) -> dict[str, Any]:
    """Train, and return the curve."""
    if teacher is not None:
        teacher.result()
    command = [sys.executable, "-m", "agentrl.cli", "train", *flags(name, folder, args)]
    started = time.perf_counter()
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    seconds = time.perf_counter() - started
    points = curve([json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()])
    print(f"{name}: {points[-1]}, {seconds:.0f} s", flush=True)
    return {"estimator": name, "flags": RUNS[name], "seconds": round(seconds), "points": points}


def curve(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The held-out score by the number of tokens that were sampled before, from the lines of metrics.jsonl."""
    points, tokens, seen = [], 0.0, set()
    for row in rows:
        if SCORE in row and row["step"] not in seen:
            seen.add(row["step"])
            points.append({"rollouts": row["step"], "tokens": round(tokens), "score": row[SCORE]})
        if "sampled_tokens" in row:
            tokens += row["sampled_tokens"] * row["episodes"] + row.get("branch_tokens", 0)
    return points


def draw(path: Path, runs: Sequence[dict[str, Any]], title: str) -> None:
    """All curves side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for made in runs:
        tokens, scores = [p["tokens"] for p in made["points"]], [p["score"] for p in made["points"]]
        axes.plot(tokens, scores, marker="o", label=made["estimator"])
    axes.set_xlabel("sampled tokens")
    axes.set_ylabel("held-out EM")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run everything, write the record and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at the same time")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--eval-interval", type=int, default=EVAL_INTERVAL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument(
        "--teacher", type=Path, default=None, help="the teacher's model folder (default: what grpo trained)"
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="where the run folders go (default: a temporary folder)"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("flags", nargs="*", help="further flags of every run, after --")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="estimators-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures: dict[str, Future[dict[str, Any]]] = {}
        for name in args.only:
            waits = name == "distillation" and args.teacher is None
            futures[name] = pool.submit(run, name, folder, args, futures["grpo"] if waits else None)
        runs = [future.result() for future in futures.values()]
    budget = min(made["points"][-1]["tokens"] for made in runs)
    for made in runs:
        tokens, scores = [p["tokens"] for p in made["points"]], [p["score"] for p in made["points"]]
        made["score_at_equal_tokens"] = round(float(np.interp(budget, tokens, scores)), 4)
    record = result_record(
        f"held-out EM after {budget} sampled tokens, best estimator",
        max(made["score_at_equal_tokens"] for made in runs),
        runs[0]["points"][0]["score"],
        "python benchmarks/estimator_curves.py " + " ".join(sys.argv[1:]),
        cores=os.cpu_count(),
        seed=args.seed,
        equal_tokens=budget,
        runs=runs,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "estimator_curves.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(args.out / "estimator_curves.png", runs, f"search_r1, embedded policy, seed {args.seed}")
    for made in sorted(runs, key=lambda made: -made["score_at_equal_tokens"]):
        print(
            f"{made['estimator']:<14} {made['score_at_equal_tokens']:.3f}  after {budget} tokens, {made['seconds']} s"
        )


if __name__ == "__main__":
    main()
