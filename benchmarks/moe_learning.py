"""Does a mixture of experts learn, and what does router replay change? search_r1 with and without it, on the CPU.

    python benchmarks/moe_learning.py --processes 16          about six minutes on 16 cores
    python benchmarks/moe_learning.py --processes 2           on a small machine

The policy is a Qwen3-MoE in the shape of the embedded policy, made of its weights (sparse upcycling, Komatsuzaki et al. 2023,
arXiv:2212.05055): 8 experts of half the width, 2 for each token. Two experts that form a pair start with the two halves of the dense
feed-forward channels, other halves in each of the 4 pairs, and routers that mostly choose a pair, so that little is lost; `agentrl sft` on
scripted episodes (examples/search_r1/warmup.py) makes the experts differ. GRPO starts from there, with --use-rollout-routing-replay and without;
a few rollouts in bfloat16, which takes long on a CPU, show the differences there. All runs go on at the same time. Writes
benchmarks/results/moe_learning_cpu.{json,png}: reward by rollout, exact match on 200 held-out questions, and the differences between the log-probs of
engine and trainer (mean and largest). The exit status is 1 if the run with replay does not gain 0.05 in exact match.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from estimator_curves import SCORE, curve
from result_record import result_record

ROOT = Path(__file__).parents[1]
DENSE = ROOT / "agentrl" / "assets" / "search_r1_3m"
EXPERTS, TOPK = 8, 2
SPLIT = 0.1
"""how far the router's rows of a pair of experts are from each other at the start, relative to the distance of the pairs"""
GAIN = 0.05
"""exact match that the run with replay has to gain"""
RUNS = {
    f"{dtype}{', replay' if replay else ''}": [
        "--dtype",
        dtype,
        *(["--use-rollout-routing-replay"] if replay else []),
    ]
    for dtype in ("float32", "bfloat16")
    for replay in (True, False)
}
LEARNER = "float32, replay"
MISMATCH = "train/rollout_log_prob_diff"


def upcycle(out: Path) -> None:
    """Write the mixture of experts whose pairs of experts together are the dense feed-forward part."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((DENSE / "config.json").read_text())
    width = config["intermediate_size"] // 2
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "float32",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,  # SGLang ignores it for this family
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: tensor.float() for name, tensor in load_file(DENSE / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for layer in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (tensors.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up", "down"))
        pairs, within = (torch.randn(EXPERTS // 2, config["hidden_size"], generator=generator) for _ in range(2))
        tensors[f"{mlp}.gate.weight"] = 0.02 * torch.stack([pairs + SPLIT * within, pairs - SPLIT * within], 1).flatten(
            0, 1
        )
        for first in range(0, EXPERTS, 2):
            halves = torch.randperm(2 * width, generator=generator).split(width)
            for expert, channels in enumerate(halves, first):
                prefix = f"{mlp}.experts.{expert}"
                tensors[f"{prefix}.gate_proj.weight"] = gate[channels].clone()
                tensors[f"{prefix}.up_proj.weight"] = up[channels].clone()
                # the weights of a token's two experts have the sum 1
                tensors[f"{prefix}.down_proj.weight"] = 2 * down[:, channels].clone()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DENSE / name, out)


def call(words: list[str], log: Path) -> float:
    """Run a Python command with one thread per process by default; returns its seconds. Its output goes to a file."""
    started = time.perf_counter()
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, *words],
            check=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    seconds = time.perf_counter() - started
    print(f"{log.stem}: {seconds:.0f} s", flush=True)
    return seconds


def warm_up(folder: Path, args: argparse.Namespace) -> Path:
    """Return the weights after supervised training on recorded episodes; they are made unless the folder has them."""
    start, episodes, run = folder / "start", folder / "episodes", folder / "sft"
    if (run / "hf" / "config.json").exists():
        return run / "hf"
    upcycle(start)
    words = ["examples/search_r1/warmup.py", "record", str(episodes), "--model", str(start)]
    words += ["--episodes", str(args.batch * args.sft_steps), "--processes", str(args.processes)]
    call(words, folder / "record.log")
    words = ["-m", "agentrl.cli", "sft", *map(str, sorted(episodes.iterdir())), "--hf-checkpoint", str(start)]
    words += ["--config", "examples/search_r1/warmup.toml", "--run", str(run), "--sft-epochs", "1"]
    words += ["--sft-batch-size", str(args.batch), "--lr", "5e-4", "--lr-warmup-rollouts", str(args.sft_steps // 10)]
    words += ["--max-tokens-per-gpu", "4096", "--moe-aux-loss-coeff", "0.01"]
    call([*words, "--actor-num-gpus-per-node", str(args.processes)], folder / "sft.log")
    return run / "hf"


def train(name: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train with GRPO; returns the curves."""
    target = folder / name.replace(", ", "-")
    ranks = max(1, args.processes // args.jobs)
    words = ["-m", "agentrl.cli", "train", "--env", "search_r1", "--hf-checkpoint", str(model), "--run", str(target)]
    learns = "float32" in name
    rollouts, interval = (args.rollouts, args.eval_interval) if learns else (args.bfloat16_rollouts, 0)
    words += ["--num-rollout", str(rollouts), "--eval-interval", str(interval), "--seed", str(args.seed)]
    words += ["--save-interval", "10000", "--actor-num-gpus-per-node", str(ranks), "--threads", str(min(ranks, 2))]
    seconds = call([*words, *RUNS[name], *args.flags], folder / f"{target.name}.log")
    rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if f"{MISMATCH}_mean" in row]
    summary = json.loads((target / "summary.json").read_text())
    return {
        "name": name,
        "flags": RUNS[name],
        "seconds": round(seconds),
        "evaluations": curve(rows),
        "rewards": [round(row["reward"], 4) for row in rows if "reward" in row],
        "mismatch_mean": [row[f"{MISMATCH}_mean"] for row in steps],
        "mismatch_max": [row[f"{MISMATCH}_max"] for row in steps],
        "exactness_violations": summary["exactness_violations"],
    }


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """Reward, exact match and mismatch by rollout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    reward, score, mismatch = figure.subplots(1, 3)
    for run in runs:
        reward.plot(run["rewards"], label=run["name"])
        score.plot([p["rollouts"] for p in run["evaluations"]], [p["score"] for p in run["evaluations"]], marker="o")
        line = mismatch.plot(run["mismatch_mean"])[0]
        mismatch.plot(run["mismatch_max"], linestyle=":", color=line.get_color())
    mismatch.set_ylabel("mean, largest (dotted)")
    reward.set_title("mean reward of a rollout")
    score.set_title("exact match, 200 held-out questions")
    mismatch.set_title("engine and trainer: difference of log-probs")
    mismatch.set_yscale("log")
    for axes in (reward, score, mismatch):
        axes.set_xlabel("rollouts")
        axes.grid(alpha=0.3)
    reward.legend()
    figure.savefig(path, dpi=110)


def result(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The record: the gain of the run with replay, and all curves."""
    for run in runs:
        scores = [point["score"] for point in run["evaluations"]]
        run["gain"] = round(scores[-1] - scores[0], 4) if scores else None
        run["mean_mismatch"] = sum(run["mismatch_mean"]) / len(run["mismatch_mean"])
        run["largest_mismatch"] = max(run["mismatch_max"])
    gain = next(run["gain"] for run in runs if run["name"] == LEARNER)
    command = "python benchmarks/moe_learning.py " + " ".join(sys.argv[1:])
    details = {"name": SCORE, "cores": os.cpu_count(), "seed": args.seed, "sft_steps": args.sft_steps, "runs": runs}
    metric = "exact match that a mixture of experts gains on search_r1 with router replay"
    return result_record(metric, gain, GAIN, command, **details)


def main() -> int:
    """Run everything, write the record and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="cores to use")
    parser.add_argument("--jobs", type=int, default=len(RUNS), help="runs at the same time")
    parser.add_argument(
        "--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN", help=f"of {list(RUNS)}"
    )
    parser.add_argument("--batch", type=int, default=64, help="episodes of a supervised step")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--bfloat16-rollouts", type=int, default=4)
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the run folders go (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("flags", nargs="*", help="further flags of every GRPO run, after --")
    args = parser.parse_args()
    if LEARNER not in args.only:
        parser.error(f"--only needs {LEARNER!r}")
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="moe-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", flush=True)
    model = warm_up(folder, args)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda name: train(name, model, folder, args), args.only))
    record = result(runs, args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "moe_learning_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(args.out / "moe_learning_cpu.png", runs)
    for run in runs:
        scores = [round(point["score"], 3) for point in run["evaluations"]]
        print(
            f"{run['name']}: exact match {scores}, reward {run['rewards'][0]:.3f} to {run['rewards'][-1]:.3f}, mismatch "
            f"{run['mean_mismatch']:.2e}, at most {run['largest_mismatch']:.2e}, {run['seconds']} s"
        )
    return int(record["value"] < GAIN)


if __name__ == "__main__":
    sys.exit(main())
