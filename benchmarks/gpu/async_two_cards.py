"""Asynchronous against synchronous training on two GPUs with genuine SGLang: search_r1 whose searches have a long tail.

    python benchmarks/gpu/async_two_cards.py --out DIR [--engine-pythonpath DIR] [--rollouts 20] [--latency 0.4]

The trainer has the first GPU, the server the second. The policy is the embedded one with heads of twice the channels, which are 0 (`wider_heads`).
Two runs of `agentrl train` differ in --schedule alone; a search takes lognormal time (median --latency seconds, sigma 1.0), the same draws in both
(benchmarks/async_learning.py). Seconds per rollout are those between the lines that the runs print, from the third rollout on, with checkpoints and
weight updates. After the asynchronous run a trainer loads the checkpoints of the versions at which generations were interrupted. It scores the
tokens of these turns with the weights that sampled them, before and after the update, with those of the other version, and with those of a distant
one. OUT/async_two_cards.json has the record {metric, value, baseline, card, formula, commit, command, date}.

`--curves` compares the learning only: both runs at once, where one has its trainer the other has its server, so that seconds say nothing. Its record
is OUT/async_two_cards_curves.json.

The exit status is 1 if a check fails: speedup at least 2, synchronous utilisation at most 0.4, exact match within 0.05 of the synchronous run's, no
exactness violations, some generations interrupted, and their log-probs at their own versions as close to the engine's as those of turns that were
not interrupted (mean at most twice), and closer than at a distant version; with --curves, if the final exact match differs by more than 0.05 or an
exactness violation was found. A run that takes longer than --limit seconds is stopped. `--tiny` makes
four small rollouts on any machine that has SGLang, and checks the script alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from mfu import gpu_record
from safetensors.torch import load_file, save_file
from sglang_cycle import FLAGS

from agentrl.run.model_folder import ASSETS
from agentrl.store.episode_files import read_episodes
from agentrl.train.base import Row
from agentrl.train.megatron.trainer import MegatronTrainer
from agentrl.types import Segment, Trajectory

ROOT = Path(__file__).parents[2]
MODEL = ASSETS / "search_r1_3m"
FORMULA = (
    "speedup = seconds per rollout, synchronous / asynchronous; utilisation = (training + weight sync) / (rollout + training + weight sync) of the "
    "synchronous run; log-prob differences: |trainer - engine| of the sampled tokens of interrupted turns"
)
SPEEDUP, UTILISATION, TOLERANCE = 2.0, 0.4, 0.05
CURVE = ("curve", "rewards", "mismatch_mean", "said", "episodes", "exactness_violations", "failures")
WARM_UP = 2
"""rollouts that are not timed"""
NOISE = 2.0
"""largest mean difference in interrupted turns, relative to that in others"""
VERSIONS, DISTANT = 8, 4
"""versions whose weights are loaded to check log-probs; how far from a token's version a distant one is"""
SCHEDULES = {
    "sync": [],
    "async": ["--schedule", "async", "--use-tis", "--async-buffer-size", "GROUPS3", "--consumption-window", "GROUPS"],
}
EVALUATION = re.compile(r"^eval test after (\d+) rollouts:.*?\bem ([0-9.]+)")
LINE = re.compile(r"^rollout\s+(\d+)\s+reward")


def wider_heads(source: Path, target: Path) -> Path:
    """The policy with heads of twice the channels that computes the same: SGLang 0.5.17 did not start a Qwen3-MoE with 32 channels a head on a GPU.

    The new channels are 0, and stay 0 in training: each factor of their gradients is. A pair of channels that is rotated together moves to where
    twice the channels have its frequency. The norm of a head divides by the root of the mean square, which is halved, so its weight is divided by
    √2; scores are divided by the root of the channels, so the weight of the queries' norm is multiplied by √2 again.
    """
    config = json.loads((source / "config.json").read_text())
    size, weights = config["head_dim"], load_file(source / "model.safetensors")
    spread = torch.cat([torch.arange(size // 2) * 2, torch.arange(size // 2) * 2 + size])

    def widen(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(0, (-1, size))
        wide = heads.new_zeros(len(heads), 2 * size, *heads.shape[2:])
        wide[:, places] = heads
        return wide.flatten(0, 1)

    for name, x in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
            weights[name] = widen(x, spread)
        elif name.endswith("v_proj.weight"):
            weights[name] = widen(x, torch.arange(size))
        elif name.endswith("o_proj.weight"):
            weights[name] = widen(x.mT, torch.arange(size)).mT.contiguous()
        if name.endswith("k_norm.weight"):
            weights[name] = weights[name] / 2**0.5
    shutil.copytree(source, target, dirs_exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"head_dim": 2 * size}, indent=1) + "\n")
    return target


def flags(schedule: str, args: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    groups, members = (2, 4) if args.tiny else (16, 8)
    words = ["--config", "envs/search_r1.toml", "--env", "benchmarks/async_learning.py:SlowSearch"]
    words += ["--env-arg", f"latency={args.latency}", "--run", str(args.out / schedule), "--engine", "sglang"]
    words += ["--hf-checkpoint", str(args.model)]
    words += ["--num-rollout", str(args.rollouts), "--eval-interval", str(args.eval_interval), "--seed", str(args.seed)]
    words += ["--rollout-batch-size", str(groups), "--n-samples-per-prompt", str(members), "--concurrency", "512"]
    words += ["--eval-limit", "4" if args.tiny else "200", "--actor-num-gpus-per-node", "1", "--tensorboard", "false"]
    words += ["--save-interval", "1", "--keep-checkpoints", "0"]
    words += ["--engine-python", args.engine_python] if args.engine_python else []
    words += ["--engine-pythonpath", args.engine_pythonpath] if args.engine_pythonpath else []
    if not args.tiny:
        words += ["--dtype", "bfloat16"]
        for name, value in {**FLAGS, "mem_fraction_static": 0.3}.items():
            words += [f"--sglang-{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    own = [{"GROUPS": str(groups), "GROUPS3": str(3 * groups)}.get(word, word) for word in SCHEDULES[schedule]]
    return [*words, *own]


@contextmanager
def gpu_utilisation(found: list[list[float]]) -> Iterator[None]:
    """Note each card's share of time with a kernel, twice a second; nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    query = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                card, _, share = line.partition(",")
                if share.strip().isdecimal():
                    found[int(card)].append(int(share) / 100)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            reader.join(5)


def train(schedule: str, args: argparse.Namespace, cards_in_order: str | None = None) -> dict[str, Any]:
    """One run; its seconds per rollout, curve and utilisation."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": cards_in_order} if cards_in_order else {})
    shutil.rmtree(args.out / schedule, ignore_errors=True)
    command = [sys.executable, "-m", "agentrl.cli", "train", *flags(schedule, args)]
    print("$", *command[2:], flush=True)
    at: list[float] = []
    cards: list[list[float]] = [[] for _ in range(16)]
    lines: list[str] = []
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **output) as process:
        limit = threading.Timer(args.limit, process.send_signal, [signal.SIGTERM])
        limit.start()
        with gpu_utilisation(cards):
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if LINE.match(line):
                    at.append(time.perf_counter())
                    if len(at) == WARM_UP:
                        for card in cards:
                            card.clear()
                    busy = [round(fmean(card), 3) for card in cards if card]
                if LINE.match(line) or line.startswith(("eval ", "groups by", "of ", "the trainer worked")):
                    print(f"{schedule}: {line.rstrip()[:200]}", flush=True)
        limit.cancel()
    if process.returncode:
        raise SystemExit(f"the {schedule} run ended with status {process.returncode}:\n" + "\n".join(lines[-40:]))
    summary = json.loads((args.out / schedule / "summary.json").read_text())
    metrics = [json.loads(line) for line in (args.out / schedule / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds_per_rollout": round((at[-1] - at[WARM_UP - 1]) / (len(at) - WARM_UP), 3),
        "gpu_utilisation": busy,
        "trainer_share": trainer_share(args.out / schedule),
        "exact_match": [summary["eval_em_first"], summary["eval_em_last"]],
        "curve": [(int(n), float(em)) for line in lines for n, em in EVALUATION.findall(line)],
        "rewards": [round(row["reward"], 4) for row in metrics if "reward" in row],
        "mismatch_mean": [row["train/rollout_log_prob_diff_mean"] for row in metrics if "train/rollout_log_prob_diff_mean" in row],
        "said": [line for line in lines if line.startswith(("groups by", "of ", "the trainer worked"))],
        **{name: summary[name] for name in ("episodes", "exactness_violations", "failures", "wall_s")},
    }  # fmt: skip


def trainer_share(run: Path) -> float:
    """Share of the timed rollouts in which the trainer and the weight sync worked."""
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "rollout_s" in row][WARM_UP:]
    work = sum(row["train_s"] + row["sync_s"] for row in rows)
    return round(work / (work + sum(row["rollout_s"] for row in rows)), 3)


def versions_by_turn(segment: Segment) -> dict[int, list[int]]:
    """The versions that sampled each turn, ascending."""
    found: dict[int, set[int]] = defaultdict(set)
    for span in segment.spans:
        if span.policy_version is not None:
            found[span.turn].add(span.policy_version)
    return {turn: sorted(versions) for turn, versions in found.items()}


def interrupted(run: Path) -> list[tuple[Trajectory, Segment]]:
    """The segments with a turn that several versions sampled."""
    return [
        (trajectory, segment)
        for trajectory in read_episodes(run)
        for segment in trajectory.segments
        if any(len(versions) > 1 for versions in versions_by_turn(segment).values())
    ]


def as_row(segment: Segment) -> tuple[Row, np.ndarray, np.ndarray]:
    """A segment's sampled tokens as a row; each token's version (-1: not sampled), and whether it is before (1) or after (2) an update
    within its turn (0: its turn has one version).
    """
    by_turn = versions_by_turn(segment)
    tokens, log_probs, versions, sides = [], [], [], []
    for span in segment.spans:
        count, version = len(span.ids), span.policy_version
        tokens += span.ids
        log_probs += span.log_probs or [0.0] * count
        versions += [-1 if version is None else version] * count
        several = by_turn.get(span.turn, []) if version is not None else []
        sides += [0 if len(several) < 2 else 1 if version == several[0] else 2] * count
    sampled = np.array(versions) >= 0
    row = Row(
        tokens=np.array(tokens, np.int32),
        weights=sampled.astype(np.float32),
        advantages=np.zeros(len(tokens), np.float32),
        rollout_log_probs=np.array(log_probs, np.float32),
        temperature=np.ones(len(tokens), np.float32),
    )
    return row, np.array(versions), np.array(sides)


def check_log_probs(run: Path, segments: Sequence[Segment], args: argparse.Namespace) -> dict[str, Any]:
    """Score tokens with the weights of their own version: of interrupted turns, before and after the update, and of other turns in the same
    episodes; and tokens of interrupted turns with the weights of the turn's other version and of a distant one.
    """
    rows = [as_row(segment) for segment in segments]
    folders = {}
    for state in sorted(run.glob("checkpoints/*/state.json")):
        folders.setdefault(json.loads(state.read_text())["policy_version"], state.parent / "trainer")
    counts: dict[int, int] = defaultdict(int)
    for _, versions, sides in rows:
        for version in set(versions[sides > 0].tolist()) & set(folders):
            counts[version] += int((versions[sides > 0] == version).sum())
    chosen = sorted(sorted(counts, key=lambda version: -counts[version])[:VERSIONS])
    names = ("before", "after", "not interrupted", "the other version", "a distant version")
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    dtype = "float32" if args.tiny else "bfloat16"
    with MegatronTrainer(args.model, dtype=dtype, run_dir=args.out, timeout_s=120.0) as trainer:
        for version in chosen:
            trainer.load(folders[version])
            log_probs = trainer.log_probs([row for row, *_ in rows], trained_only=True)
            for (row, versions, sides), own in zip(rows, log_probs, strict=True):
                d, now = np.abs(own - row.rollout_log_probs), versions == version
                found["before"].append(d[(sides == 1) & now])
                found["after"].append(d[(sides == 2) & now])
                found["not interrupted"].append(d[(sides == 0) & now])
                adjacent = np.abs(versions - version) == 1
                found["the other version"].append(d[(sides > 0) & adjacent & (now & (sides > 0)).any()])
                found["a distant version"].append(d[(sides > 0) & (np.abs(versions - version) >= DISTANT)])
    joined = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in found.items()}
    return {
        "versions": chosen,
        **{
            name: {"tokens": len(d), "mean": float(d.mean()) if len(d) else None, "max": float(d.max(initial=0))}
            for name, d in joined.items()
        },
    }


def checks(runs: dict[str, Any], speedup: float, differences: dict[str, Any], count: int) -> dict[str, bool]:
    """What has to hold."""
    means = {name: part["mean"] for name, part in differences.items() if name != "versions" and part["tokens"]}
    own = [means[name] for name in ("before", "after") if name in means]
    return {
        f"speedup at least {SPEEDUP}": speedup >= SPEEDUP,
        f"synchronous utilisation at most {UTILISATION}": runs["sync"]["trainer_share"] <= UTILISATION,
        f"exact match at least the synchronous run's - {TOLERANCE}": runs["async"]["exact_match"][1]
        >= runs["sync"]["exact_match"][1] - TOLERANCE,
        "no exactness violation": not any(run["exactness_violations"] for run in runs.values()),
        "generations were interrupted": count > 0,
        f"log-probs of interrupted turns within {NOISE} x those of others": len(own) == 2
        and max(own) <= NOISE * means.get("not interrupted", 0.0),
        "log-probs closer than at a distant version": len(own) == 2 and max(own) < means.get("a distant version", 0.0),
    }


def compare_curves(args: argparse.Namespace, out: Path) -> int:
    """Both runs at once; writes the record of their curves."""
    with ThreadPoolExecutor() as pool:
        cards = {"sync": "0,1", "async": "1,0"} if torch.cuda.is_available() else dict.fromkeys(SCHEDULES)
        jobs = {schedule: pool.submit(train, schedule, args, order) for schedule, order in cards.items()}
        runs = {schedule: job.result() for schedule, job in jobs.items()}
    sync, other = (runs[schedule]["exact_match"][1] for schedule in SCHEDULES)
    violations = sum(run["exactness_violations"] for run in runs.values())
    record = gpu_record(
        f"exact match on 200 held-out questions after {args.rollouts} rollouts, asynchronous - synchronous, search_r1 with slow searches, SGLang",
        round(other - sync, 4),
        -TOLERANCE,
        "difference of the last evaluations; both runs at once on two cards, so that their seconds say nothing",
        args.commit,
        exactness_violations=violations,
        runs={schedule: {k: v for k, v in run.items() if k in CURVE} for schedule, run in runs.items()},
    )
    (out / "async_two_cards_curves.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 0 if abs(other - sync) <= TOLERANCE and not violations else 1


def main() -> int:
    """Run both, check, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of the runs (default: OUT)")
    parser.add_argument("--engine-python", help="the interpreter that has SGLang (default: as for agentrl train)")
    parser.add_argument("--engine-pythonpath", help="folder with SGLang, for the server's process alone")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--latency", type=float, default=0.4, help="median seconds of a search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a run is stopped")
    parser.add_argument("--commit")
    parser.add_argument("--curves", action="store_true", help="compare the learning only, both runs at once")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    result = (args.out / "async_two_cards.json").absolute()
    args.out = (args.work or args.out).absolute()
    for folder in (result.parent, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        args.rollouts, args.limit = 4, 600.0
    args.eval_interval = max(1, args.rollouts // 4) if args.curves else args.rollouts
    args.model = wider_heads(MODEL, args.out / "model")
    if args.curves:
        return compare_curves(args, result.parent)
    runs = {schedule: train(schedule, args) for schedule in SCHEDULES}
    found = interrupted(args.out / "async")
    differences = check_log_probs(args.out / "async", [segment for _, segment in found], args)
    speedup = round(runs["sync"]["seconds_per_rollout"] / runs["async"]["seconds_per_rollout"], 3)
    verdicts = checks(runs, speedup, differences, len(found))
    cards = f"2 x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "cpu"
    record = gpu_record(
        "seconds per rollout of synchronous training / asynchronous, search_r1 with slow searches, SGLang and trainer on a card each",
        speedup,
        SPEEDUP,
        FORMULA,
        args.commit,
        cards=cards,
        utilisation=runs["sync"]["trainer_share"],
        interrupted_episodes=len({trajectory.episode_id for trajectory, _ in found}),
        log_prob_differences=differences,
        checks=verdicts,
        runs=runs,
    )
    result.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "runs"}, indent=1))
    return 0 if args.tiny or all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
