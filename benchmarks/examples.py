"""The small examples on this machine: warm-up, training, and a control. Writes benchmarks/results/NAME_cpu.{json,png}.

    python benchmarks/examples.py NAME OUT [--note TEXT] [--FLAG VALUE ...]

NAME is a folder of examples/. One with a demonstrator begins with a warm-up, and a `server.py` in it runs meanwhile. OUT keeps the runs: `warm`,
`learn`, `control-1`, `control-2`; those that are there already are not repeated. The control is what a learning rate of 0 leaves: the weights of
the start, evaluated with other seeds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from result_record import commit

HERE = Path(__file__).parent
SCORES = {
    "calculator": "correct",
    "self_play": "won.X",
    "frozen_lake": "reward",
    "reasoning_gym": "reward",
    "retool": "correct",
    "search_r1_http": "em",
}
"""the evaluation score of each example, as in its metrics"""
EPISODES = {"calculator": 1500, "self_play": 600, "frozen_lake": 300, "reasoning_gym": 1500, "retool": 1200}
"""scripted episodes of the warm-up"""


def agentrl(words: list[str]) -> None:
    """Run a command of agentrl from the root of the repository."""
    print("$ agentrl", *words, flush=True)
    subprocess.run([sys.executable, "-m", "agentrl.cli", *words], check=True, cwd=HERE.parent)


def curve(run: Path, score: str) -> dict[str, Any]:
    """The evaluations and the rewards of a run, as lists of [rollouts before, value]."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = {row["step"]: row[f"eval/test/{score}"] for row in rows if f"eval/test/{score}" in row}
    rewards = {row["step"]: row["reward"] for row in rows if "reward" in row}
    return {"eval": sorted(evals.items()), "train_reward": sorted(rewards.items())}


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Run the example's server, if it has one, until the block ends."""
    if not (script := folder / "server.py").exists():
        yield
        return
    process = subprocess.Popen([sys.executable, str(script)], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{script} ended with status {process.wait()}")
        print(f"serving {line.strip()}", flush=True)
        yield
    finally:
        process.kill()
        process.wait()


def draw(path: Path, name: str, score: str, learn: dict[str, Any], control: list[float]) -> None:
    """Draw the curves of training beside the control."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for key, ax, title in (("eval", axes[0], f"held-out {score}"), ("train_reward", axes[1], "reward in training")):
        ax.plot(*zip(*learn[key], strict=True), "o-", label="training", markersize=3)
        ax.set(title=f"{name}: {title}", xlabel="rollouts")
    for value in control:
        axes[0].axhline(value, linestyle="--", color="grey", label="start, another seed")
    axes[0].legend()
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    """Run what is missing, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SCORES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--note", default="", help="for the record, such as the load of the machine")
    args, flags = parser.parse_known_args()
    folder, out, score = HERE.parent / "examples" / args.name, args.out.absolute(), SCORES[args.name]
    warm = (folder / "demonstrator.py").exists()
    if warm and not (out / "warm").exists():
        warm_up = [HERE.parent / "examples/warm_up.py", folder, out / "warm", "--episodes", EPISODES[args.name]]
        subprocess.run([sys.executable, *map(str, warm_up)], check=True)
    words = ["--config", str(folder / "config.toml"), *(["--model", str(out / "warm/hf")] if warm else []), *flags]
    with serving(folder):
        if not (out / "learn").exists():
            agentrl(["train", *words, "--run", str(out / "learn")])
        for seed in (1, 2):
            if not (run := out / f"control-{seed}").exists():
                agentrl(["eval", *words, "--seed", str(seed), "--run", str(run)])
    learn = curve(out / "learn", score)
    control = [value for seed in (1, 2) for _, value in curve(out / f"control-{seed}", score)["eval"]]
    result = {
        "metric": f"held-out {score}, sampled at temperature 1",
        "value": learn["eval"][-1][1],
        "baseline": {"before": learn["eval"][0][1], "start_with_other_seeds": control},
        **learn,
        "cores": os.cpu_count(),
        "note": args.note,
        "commit": commit(),
        "command": f"python benchmarks/examples.py {args.name} OUT",
        "date": datetime.date.today().isoformat(),
    }
    results = HERE / "results"
    (results / f"{args.name}_cpu.json").write_text(json.dumps(result) + "\n")
    draw(results / f"{args.name}_cpu.png", args.name, score, learn, control)


if __name__ == "__main__":
    main()
