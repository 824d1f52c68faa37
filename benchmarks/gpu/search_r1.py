"""search_r1 on one GPU that engine and trainer share: SmolLM2-135M, warmed up by demonstrations, then GRPO with SGLang.

    python benchmarks/gpu/search_r1.py WORK --out DIR [--model smollm2-135m] [--engine-pythonpath DIR] [--episodes 51200] [--rollouts 60]
        [--kill-after N]

It runs three commands, each only if its result is not in WORK yet: record demonstrations, `agentrl sft`, `agentrl train --engine sglang
--colocate`. It writes DIR/search_r1_gpu.json, and beside it the curve, metrics and timings of the runs. `--kill-after N` ends the server with
SIGKILL during the rollout after step N: the run must continue with a new server.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from sglang_cycle import FLAGS

ROOT = Path(__file__).parents[2]
SFT = (
    "--env search_r1 --calculate-per-token-loss --sft-batch-size 128 --sft-epochs 1 --lr 3e-4 --lr-warmup-rollouts 30 --lr-decay-style linear "
    "--max-tokens-per-gpu 16384 --actor-num-gpus-per-node 1"
)
TRAIN = (
    "--env search_r1 --engine sglang --colocate --actor-num-gpus-per-node 1 --rollout-batch-size 32 --n-samples-per-prompt 8 --lr 1e-5 "
    "--max-tokens-per-turn 64 --concurrency 256 --max-tokens-per-gpu 16384 --save-interval 1000 --eval-interval 10 --tensorboard false"
)


def run(words: list[str], meanwhile: Callable[[int], None] = lambda pid: None) -> float:
    """Run a command to its end; seconds. `meanwhile` is given its process id, in a thread, and has to come to an end too."""
    print("$", *words, flush=True)
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(words, cwd=ROOT) as process:
        other = pool.submit(meanwhile, process.pid)
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, words)
    other.result()
    return time.perf_counter() - started


def kill_server(metrics: Path, step: int, job: int, into_s: float = 1.0) -> None:
    """SIGKILL for the server that a job has started, `into_s` into the rollout that follows a step."""
    while reached(metrics) < step:
        if not psutil.pid_exists(job) or psutil.Process(job).status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"the run ended before step {step}: no server was killed")
        time.sleep(0.1)
    time.sleep(into_s)
    server = next(p for p in psutil.Process(job).children() if "sglang.launch_server" in p.cmdline())
    print(f"kill -9 {server.pid}, the server, after step {step}", flush=True)
    server.kill()


def reached(metrics: Path) -> int:
    """The last step in a file of metrics."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return max((json.loads(line).get("policy_version", 0) for line in lines if line.endswith("\n")), default=0)


def agentrl(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", *words]


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "megatron-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unpacked"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine-pythonpath")
    parser.add_argument("--episodes", type=int, default=51_200)
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--only", choices=("sft", "train"))
    parser.add_argument("--kill-after", type=int, metavar="N")
    parser.add_argument("--run", default="run", help="name of the training run's folder in WORK")
    args = parser.parse_args()
    from agentrl.run.model_folder import model_folder

    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    start, demos, warm, learned = model_folder(args.model), args.work / "demos", args.work / "sft", args.work / args.run
    seconds: dict[str, float] = {}
    if not (warm / "hf").exists() and args.only != "train":
        processes = max(1, (os.cpu_count() or 2) - 2)
        if not demos.exists():
            half = demos.with_suffix(".part")
            shutil.rmtree(half, ignore_errors=True)
            warmup = [sys.executable, "examples/search_r1/warmup.py", "record", str(half), "--model", str(start)]
            seconds["record"] = run([*warmup, "--episodes", str(args.episodes), "--processes", str(processes)])
            half.rename(demos)
        parts = sorted(str(p) for p in demos.iterdir())
        flags = [
            "--hf-checkpoint",
            str(start),
            "--run",
            str(warm),
            "--dtype",
            "bfloat16",
            "--rollout-max-context-len",
            "512",
        ]
        seconds["sft"] = run(agentrl("sft", *parts, *flags, *SFT.split()))
        shutil.copy(warm / "metrics.jsonl", args.out / "sft_metrics.jsonl")
        (args.work / "seconds.json").write_text(json.dumps(seconds))
    if args.only == "sft":
        return
    if (args.work / "seconds.json").exists():
        seconds = json.loads((args.work / "seconds.json").read_text())
    flags = [
        "--hf-checkpoint",
        str(warm / "hf"),
        "--run",
        str(learned),
        "--dtype",
        "bfloat16",
        "--num-rollout",
        str(args.rollouts),
    ]
    if args.engine_pythonpath:
        flags += ["--engine-pythonpath", args.engine_pythonpath]
    for name, value in {**FLAGS, "mem_fraction_static": 0.4}.items():
        flags += [f"--sglang-{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    kill = partial(kill_server, learned / "metrics.jsonl", args.kill_after) if args.kill_after else lambda pid: None
    try:
        seconds["train"] = run(agentrl("train", *TRAIN.split(), *flags), kill)
    finally:
        for name in ("metrics.jsonl", "timings.jsonl", "summary.json", "curve.png"):
            if (learned / name).exists():
                shutil.copy(learned / name, args.out / name)
    write(args, seconds, json.loads((learned / "summary.json").read_text()))


def write(args: argparse.Namespace, seconds: dict[str, float], summary: dict) -> None:
    """The results as JSON."""
    import torch

    lines = [json.loads(x) for x in (args.out / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (r["step"], round(v, 4)) for r in lines for k, v in r.items() if k.startswith("eval/") and k.endswith("/em")
    ]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(0),
        "versions": versions(),
        "command": "python benchmarks/gpu/search_r1.py " + " ".join(sys.argv[1:]),
        "seconds": {k: round(v, 1) for k, v in seconds.items()},
        "flags": TRAIN,
        "held_out_em": curve,
        "summary": summary,
    }
    (args.out / "search_r1_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
