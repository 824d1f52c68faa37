"""search_r1 with adapters of rank 8 beside the training of all weights, with seed 0. Writes benchmarks/results/lora_cpu.{json,png}.

python benchmarks/lora.py [--rank 8] [--lr 5e-4] [--run RUN] [--out FOLDER] [FLAG …]

The training of all weights is that of benchmarks/results/search_r1_cpu_seed0.json; its optimizer is measured in one small rollout. If RUN exists
already, it is read and not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from estimator_curves import SCORE, curve
from result_record import result_record

HERE = Path(__file__).parent
WHOLE = HERE / "results" / "search_r1_cpu_seed0.json"
SMALL = ["--num-rollout", "1", "--rollout-batch-size", "4", "--eval-interval", "0"]


def train(run: Path, *words: str) -> Path:
    """Run `agentrl train` on search_r1 unless the folder exists."""
    if not run.exists():
        config = ["--config", str(HERE.parent / "examples" / "search_r1" / "config.toml")]
        subprocess.run([sys.executable, "-m", "agentrl.cli", "train", *config, "--run", str(run), *words], check=True)
    return run


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def optimizer_mib(run: Path) -> float:
    """The size of the optimizer's states."""
    sizes = [row["train/optimizer_mib"] for row in lines(run / "timings.jsonl") if "train/optimizer_mib" in row]
    return round(sizes[-1], 2)


def described(name: str, metrics: list[dict[str, Any]], mib: float) -> dict[str, Any]:
    """Curves of a run: held-out exact match, and the mean reward of each rollout."""
    rewards = [round(row["reward"], 4) for row in metrics if "reward" in row]
    return {"name": name, "optimizer_mib": mib, "points": curve(metrics), "rewards": rewards}


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """Held-out exact match over rollouts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        label = f"{run['name']}, optimizer {run['optimizer_mib']:g} MiB"
        axes.plot([p["rollouts"] for p in run["points"]], [p["score"] for p in run["points"]], marker="o", label=label)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("held-out EM")
    axes.set_title("search_r1, seed 0")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", default="5e-4")
    parser.add_argument("--run", type=Path, default=None, help="run folder (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args, more = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="lora-"))
    words = ["--lora-rank", str(args.rank), "--lr", args.lr]
    run = train(args.run or folder / "adapters", *words, *more)
    whole = train(folder / "whole", *SMALL)
    runs = [
        described(f"adapters of rank {args.rank}, lr {args.lr}", lines(run / "metrics.jsonl"), optimizer_mib(run)),
        described("all weights, lr 5e-5", json.loads(WHOLE.read_text())["metrics"], optimizer_mib(whole)),
    ]
    summary = json.loads((run / "summary.json").read_text())
    last, baseline = (r["points"][-1]["score"] for r in runs)
    command = f"python benchmarks/lora.py --rank {args.rank} --lr {args.lr}"
    details = {"name": SCORE, "rollouts": summary["rollouts"], "runs": runs}
    args.out.mkdir(exist_ok=True, parents=True)
    record = result_record(
        "held-out exact match of search_r1, greedy, 200 questions", last, baseline, command, **details
    )
    (args.out / "lora_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(args.out / "lora_cpu.png", runs)
    print({r["name"]: (r["points"][-1]["score"], r["optimizer_mib"]) for r in runs})


if __name__ == "__main__":
    main()
