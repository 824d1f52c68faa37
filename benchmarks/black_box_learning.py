"""Does a black box learn as the native environment does? examples/black_box (an agent on the OpenAI SDK) and search_r1, from the same checkpoint.

    python benchmarks/black_box_learning.py [--seeds 0] [--rollouts 40] [--jobs 2] [--out FOLDER] [--keep FOLDER] [-- FLAGS]

Each run is `agentrl train` with the settings of the example and two trainer processes; FLAGS go to every run. With `--keep` a run that is complete
in its folder is not repeated, and one that was ended is resumed, so that the runs can be made one by one (`--only native`, `--only black_box`) and in
parts (`-- --save-interval 5`). Writes black_box_learning.json and
.png: exact match on 200 held-out questions after equal numbers of episodes, whether the weights are equal bit for bit, and which metrics differ. The
exit status is 1 if the final exact match of the black box is more than 0.03 below that of the native environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from result_record import result_record

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.03
ENVS = {"native": "search_r1", "black_box": "examples/black_box/search.py"}


def run(env: str, seed: int, folder: Path, rollouts: int, flags: list[str]) -> dict[str, Any]:
    """Train once, unless the folder has the complete run; its evaluations, and the hash of its weights."""
    target = folder / f"{env}-{seed}"
    words = ["--env", ENVS[env], "--run", str(target), "--seed", str(seed), "--num-rollout", str(rollouts), *flags]
    if (target / "config.toml").exists():
        words = ["--resume", str(target)]
    if not (target / "summary.json").exists():
        print("$ agentrl train", *words, flush=True)
        command = [sys.executable, "-m", "agentrl.cli", "train", *words]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = read_metrics(target)
    summary = json.loads((target / "summary.json").read_text())
    return {
        "env": env,
        "seed": seed,
        "evaluations": [(row["step"], row["eval/test/em"]) for row in rows if "eval/test/em" in row],
        "weights_sha256": hashlib.sha256((target / "hf/model.safetensors").read_bytes()).hexdigest(),
        **{name: summary[name] for name in ("eval_em_last", "episodes", "exactness_violations", "wall_s")},
    }


def read_metrics(target: Path) -> list[dict[str, Any]]:
    """The metrics of a run, a dict for each step."""
    return [json.loads(line) for line in (target / "metrics.jsonl").read_bytes().splitlines()]


def differing_metrics(folder: Path, seed: int) -> dict[str, int]:
    """In how many steps each metric differs between the two runs of a seed."""
    native, black_box = (read_metrics(folder / f"{env}-{seed}") for env in ENVS)
    pairs = list(zip(native, black_box, strict=True))
    steps = {
        name: sum(a.get(name) != b.get(name) for a, b in pairs)
        for name in sorted({k for p in pairs for r in p for k in r})
    }
    return {name: count for name, count in steps.items() if count}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Exact match over rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    looks = {
        "native": {"color": "tab:blue", "linewidth": 4, "alpha": 0.4},
        "black_box": {"color": "tab:orange", "marker": "."},
    }
    for result in runs:
        label = result["env"] if result["seed"] == runs[0]["seed"] else None
        axis.plot(*zip(*result["evaluations"], strict=True), label=label, **looks[result["env"]])
    axis.set_xlabel("rollouts")
    axis.set_ylabel("exact match, held-out questions")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; each takes two cores")
    parser.add_argument("--only", choices=list(ENVS), help="make the runs of one environment, and write no result")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--keep", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: more flags of agentrl train")
    args = parser.parse_args()
    wanted = [(env, seed) for seed in args.seeds for env in ENVS if args.only in (None, env)]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = (args.keep or Path(temporary)).absolute()
        runs = list(pool.map(lambda w: run(*w, folder, args.rollouts, args.flags), wanted))
        differing = {} if args.only else {seed: differing_metrics(folder, seed) for seed in args.seeds}
    if args.only:
        print(*runs, sep="\n")
        return 0
    final = {env: fmean(r["eval_em_last"] for r in runs if r["env"] == env) for env in ENVS}
    of = {(r["env"], r["seed"]): r for r in runs}
    equal = [s for s in args.seeds if of["native", s]["weights_sha256"] == of["black_box", s]["weights_sha256"]]
    args.out.mkdir(parents=True, exist_ok=True)
    draw(runs, args.out / "black_box_learning.png")
    flags = " ".join(["--seeds", *map(str, args.seeds), "--rollouts", str(args.rollouts), *args.flags])
    difference = round(final["native"] - final["black_box"], 4)
    record = result_record(
        "final exact match of native search_r1 - of the black box",
        difference,
        TOLERANCE,
        f"python benchmarks/black_box_learning.py {flags}".rstrip(),
        final=final,
        seeds_with_equal_weights=equal,
        steps_with_other_metrics=differing,
        runs=runs,
    )
    (args.out / "black_box_learning.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"exact match: {final}; seeds with equal weights: {equal} of {args.seeds}; metrics that differ: {differing}")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
