"""Loss, update and tokens per second of the trainer on several GPUs, by layout, against one GPU in the same run.

    python benchmarks/gpu/layouts.py --out DIR [--model 1.7b] [--layouts tp2 pp2 dp2 cp2 ep2] [--micro-batches 4] [--steps 5]

The model has random weights in a shape of Qwen3, bf16; `ep2`, which divides experts over the GPUs, and `moe-dp2` have a Qwen3-MoE of 16 layers and
64 experts, and are compared with that model on one GPU. Rows of 4,096 tokens in micro-batches of 16,384 on each data-parallel rank, every token
trained, optimizer included; with context parallelism a micro-batch has twice as many tokens. Each layout computes the loss of the same rows before
and after its first optimizer step, and the log-probs of all tokens; their differences to one GPU are in the record, beside the difference that a
change of the packing alone makes on one GPU (`noise`). OUT/layouts.json has a record {metric, value, baseline, card, formula, commit, command,
date} for each layout. `--tiny` runs the same on any machine, which checks the script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mfu import SHAPES, TINY, TINY_MOE, gpu_record, make_rows, rates, timed, write_model

from agentrl.train.base import Floats, LossConfig, Row
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.trainer import MegatronTrainer

FORMULA = (
    "scaling = tokens/s of the layout / tokens/s of one GPU; log-prob differences: mean and largest absolute difference over all trained tokens "
    "before the first step; update difference: mean absolute difference of the log-probs after one optimizer step, of the mean absolute change "
    "that the step made on one GPU"
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "noise": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "dp2-distopt": {"use_distributed_optimizer": True},
    "ep2": {"expert_model_parallel_size": 2},
    "moe-dp2": {},
}
"""Megatron's settings; `one` and `noise` run on one GPU, the others on two."""
SINGLE = ("one", "noise")
MIXTURES = ("ep2", "moe-dp2")
"""layouts of the model with experts"""
LR = 1e-5


def measure(args: argparse.Namespace, name: str, folder: Path, rows: list[Row], card: str) -> dict[str, Any]:
    """Losses, log-probs before and after one step, rates."""
    single = name in SINGLE
    options = {
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "micro_batch_tokens": args.micro_batch // (2 if name == "noise" else 1),
        "megatron": LAYOUTS[name],
        "world_size": 1 if single else 2,
        "tree_packing": False,
    }
    with MegatronTrainer(folder, run_dir=args.out / name, timeout_s=600, **options) as trainer:
        before = trainer.log_probs(rows, trained_only=True)
        metrics = trainer.step(rows, LossConfig(), LR)
        after = trainer.log_probs(rows, trained_only=True)
        result = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "before": before, "after": after}
        if name == "noise":
            return result
        peaks: list[float] = []

        def step() -> None:
            peaks.append(trainer.step(rows, LossConfig(), LR)["rates"].get("peak_memory_mib_max", 0))

        seconds = timed(step, args.steps)
    found = rates(folder, rows, seconds, card)
    if "mfu" in found:
        found["mfu"] = round(found["mfu"] / options["world_size"], 4)
    return result | {"rates": {**found, "peak_memory_gib": round(max(peaks) / 1024, 1)}}


def trained(rows: list[Row], values: list[Floats]) -> Floats:
    return np.concatenate([v[row.weights != 0] for row, v in zip(rows, values, strict=True)])


def difference(rows: list[Row], one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How far a layout is from one GPU."""
    before, after = (np.abs(trained(rows, one[k]) - trained(rows, other[k])) for k in ("before", "after"))
    change = np.abs(trained(rows, one["after"]) - trained(rows, one["before"])).mean()
    return {
        "loss": abs(one["loss"] - other["loss"]),
        "grad_norm_relative": abs(one["grad_norm"] - other["grad_norm"]) / one["grad_norm"],
        "log_prob_mean": float(before.mean()),
        "log_prob_max": float(before.max()),
        "update_relative": float(after.mean() / change),
    }


def compare(args: argparse.Namespace, model: str, names: list[str], card: str) -> Iterator[dict[str, Any]]:
    """Measure a model on one GPU, and in each layout on two; yields the records."""
    length, config = (64, TINY_MOE if model == "moe" else TINY) if args.tiny else (4096, SHAPES[model])
    folder = args.models / (f"tiny-{config['model_type']}" if args.tiny else model)
    if not (folder / "model.safetensors.index.json").exists():
        write_model(folder, config)
    torch.cuda.empty_cache()
    rows = make_rows(args.micro_batches * (args.micro_batch // length), length, read_model_config(folder).vocab_size)
    one = measure(args, "one", folder, rows, card)
    noise = difference(rows, one, measure(args, "noise", folder, rows, card))
    print("one GPU,", model, json.dumps(one["rates"]), "noise", json.dumps(noise), flush=True)
    for name in names:
        result = measure(args, name, folder, rows, card)
        value = {**result["rates"], "difference": difference(rows, one, result)}
        value["scaling"] = round(value["tokens_per_s"] / one["rates"]["tokens_per_s"], 3)
        print(name, json.dumps(value), flush=True)
        shape = f"Qwen3-{model} shape, bf16, rows of {length} in micro-batches of {args.micro_batch}"
        baseline = {"one GPU": one["rates"], "noise": noise}
        yield gpu_record(f"layout {name} on two GPUs: {shape}", value, baseline, FORMULA, args.commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "moe"], default="1.7b")
    names = [name for name in LAYOUTS if name not in SINGLE]
    parser.add_argument("--layouts", nargs="+", choices=names, default=names)
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per optimizer step")
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps")
    parser.add_argument(
        "--models", type=Path, default=Path("/tmp/mfu-models"), help="where the random models are written"
    )
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.micro_batch = 256 if args.tiny else 16384
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    records = []
    for model, mixture in ((args.model, False), ("moe", True)):
        chosen = [name for name in args.layouts if (name in MIXTURES) is mixture]
        for record in compare(args, model, chosen, card) if chosen else ():
            records.append(record)
            (args.out / "layouts.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
