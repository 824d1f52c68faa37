"""The trainer's tokens per second, model FLOPs utilisation and memory on one GPU, beside a plain transformers loop in the same run.

    python benchmarks/gpu/mfu.py --out DIR [--parts 1.7b 0.6b 1.7b-32k 8b] [--micro-batches 4] [--steps 5] [--profile]

Models have random weights in the shapes of Qwen3; every token of a row is trained, with the policy loss, in bf16, optimizer included. The loop
is transformers with scaled_dot_product_attention, bf16 weights and Adam states and torch's fused AdamW, at the fastest of several micro-batch
sizes and as many tokens for each optimizer step as the trainer. Both are timed over whole steps, and the median counts. A record
{metric, value, baseline, card, formula, commit, command, date} for each part is written to OUT/mfu.json after every part. `--tiny` runs the same on
any machine, which checks the script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from agentrl.train.base import LossConfig, Row
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.throughput import layer_parameters, peak_flops, row_work, step_flops
from agentrl.train.megatron.trainer import MegatronTrainer

FORMULA = (
    "MFU = [6·P·tokens + 12·L·A·keys + 6·V·h·predictions] / (seconds · peak FLOP/s); P: parameters of the layers' matrices, A: heads · head "
    "dimension, keys: Σ over tokens of the tokens attended to, no padding, no recomputation (agentrl/train/megatron/throughput.py)"
)
WARM_UP = 3
"""steps that are not timed: kernels are compiled, memory is allocated"""
VOCAB = 151936
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def shape(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
    }


def mixture(config: dict[str, Any], *, experts: int, topk: int, width: int) -> dict[str, Any]:
    """The shape with experts in every layer, as Qwen3-MoE."""
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


SHAPES = {
    "0.6b": shape(1024, 3072, 28, 16, tied=True),
    "1.7b": shape(2048, 6144, 28, 16, tied=True),
    "8b": shape(4096, 12288, 36, 32, tied=False),
    "moe": mixture(shape(1024, 3072, 16, 16, tied=False), experts=64, topk=8, width=384),
}
TINY = {**shape(64, 128, 2, 8, tied=True), "vocab_size": 512, "head_dim": 8}
TINY_MOE = mixture({**TINY, "tie_word_embeddings": False}, experts=8, topk=2, width=32)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One measurement."""

    model: str
    length: int = 4096
    """tokens of a row"""
    micro_batch: int = 16384
    """tokens of a micro-batch"""
    megatron: dict[str, Any] = field(default_factory=dict)
    loop: tuple[int, ...] = ()
    """rows of a micro-batch to try in the transformers loop; none: no loop"""


PARTS = {
    "1.7b": Part(model="1.7b", loop=(4, 2)),
    "0.6b": Part(model="0.6b", loop=(4, 2)),
    "1.7b-32k": Part(model="1.7b", length=32768, micro_batch=32768),
    "1.7b-32k-recompute": Part(model="1.7b", length=32768, micro_batch=32768, megatron=RECOMPUTE),
    "8b": Part(
        model="8b",
        megatron={**RECOMPUTE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
}


def mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's MLP, or of its router and experts."""
    h, experts = config["hidden_size"], config.get("num_experts", 0)
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    prefixes = [f"mlp.experts.{i}" for i in range(experts)] or ["mlp"]
    parts = {"gate_proj": (width, h), "up_proj": (width, h), "down_proj": (h, width)}
    shapes = {f"{prefix}.{part}.weight": size for prefix in prefixes for part, size in parts.items()}
    return shapes | ({"mlp.gate.weight": (experts, h)} if experts else {})


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a Hugging Face folder with random bf16 weights, one file per layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    h, d = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    weight_map: dict[str, str] = {}

    def write(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {
            name: (torch.ones(s) if len(s) == 1 else 0.02 * torch.randn(s, device=device)).to(torch.bfloat16).cpu()
            for name, s in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    top = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        top["lm_head.weight"] = (config["vocab_size"], h)
    write("top.safetensors", top)
    layer = {
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        **mlp_shapes(config),
    }
    for number in range(config["num_hidden_layers"]):
        write(f"layer{number}.safetensors", {f"model.layers.{number}.{name}": s for name, s in layer.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_rows(count: int, length: int, vocab: int) -> list[Row]:
    """Rows of random tokens, all trained, with random advantages."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(count):
        weights = np.full(length, 1 / count / (length - 1), np.float32)
        weights[0] = 0
        advantages = np.full(length, draw.standard_normal(), np.float32) * (weights > 0)
        rows.append(
            Row(
                tokens=draw.integers(10, vocab, length).astype(np.int32),
                weights=weights,
                advantages=advantages.astype(np.float32),
                rollout_log_probs=np.full(length, -12, np.float32) * (weights > 0),
                temperature=np.ones(length, np.float32),
            )
        )
    return rows


def timed(step: Callable[[], Any], count: int) -> float:
    """Median seconds of `count` steps after the warm-up."""
    seconds = []
    for number in range(WARM_UP + count):
        started = time.perf_counter()
        step()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def rates(folder: Path, rows: list[Row], seconds: float, card: str) -> dict[str, float]:
    work, model = row_work(rows), read_model_config(folder)
    peak = peak_flops(card)
    result = {"tokens_per_s": round(work.tokens / seconds), "step_s": round(seconds, 4)}
    return result | ({"mfu": round(step_flops(model, work) / seconds / peak, 4)} if peak else {})


def measure(args: argparse.Namespace, name: str, part: Part, folder: Path, card: str) -> dict[str, Any]:
    """The trainer's rates and largest memory; with --profile also the trace of one more step."""
    rows = rows_of(args, part, folder)
    peaks: list[float] = []
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    options = {"dtype": dtype, "micro_batch_tokens": part.micro_batch, "megatron": part.megatron}
    with MegatronTrainer(folder, run_dir=args.out / name, timeout_s=900, **options) as trainer:

        def step() -> None:
            metrics = trainer.step(rows, LossConfig(), 1e-6)
            peaks.append(metrics["rates"].get("peak_memory_mib_max", 0))

        seconds = timed(step, args.steps)
        if args.profile:
            trainer.step(rows, LossConfig(), 1e-6, profile=args.out / name / "profile")
    return {**rates(folder, rows, seconds, card), "peak_memory_gib": round(max(peaks) / 1024, 1)}


def rows_of(args: argparse.Namespace, part: Part, folder: Path) -> list[Row]:
    count = args.micro_batches * (part.micro_batch // part.length)
    return make_rows(count, part.length, read_model_config(folder).vocab_size)


def measure_loop(args: argparse.Namespace, part: Part, folder: Path, card: str) -> dict[str, Any]:
    """The rates of the transformers loop with the fastest of the micro-batch sizes, each in a separate process."""
    tried: dict[str, Any] = {}
    for size in part.loop:
        words = ["--loop", str(folder), "--loop-rows", str(size), "--loop-length", str(part.length)]
        options = ["--micro-batches", str(args.micro_batches), "--steps", str(args.steps), "--out", str(args.out)]
        count = ["--loop-count", str(args.micro_batches * (part.micro_batch // part.length))]
        done = subprocess.run(
            [sys.executable, __file__, *words, *options, *count], capture_output=True, text=True, timeout=600
        )
        last = done.stdout.strip().rpartition("\n")[2]
        tried[f"{size} rows"] = json.loads(last) if done.returncode == 0 else done.stderr.strip()[-300:]
    fitting = [r for r in tried.values() if isinstance(r, dict)]
    best = max(fitting, key=lambda r: r["tokens_per_s"]) if fitting else {}
    return {**best, "tried": tried, "card": card}


def loop(args: argparse.Namespace) -> dict[str, Any]:
    """One optimizer step after another, as one would write it with transformers."""
    from transformers import AutoModelForCausalLM

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.loop, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    rows = make_rows(args.loop_count, args.loop_length, model.config.vocab_size)
    tokens = torch.from_numpy(np.stack([r.tokens for r in rows])).long().to(device)
    advantages = torch.from_numpy(np.stack([r.advantages[1:] for r in rows])).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for part, weight in zip(tokens.split(args.loop_rows), advantages.split(args.loop_rows), strict=True):
            logits = model(part[:, :-1], use_cache=False).logits.float()
            labels = part[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
            (loss * weight.flatten()).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if gpu:
            torch.cuda.synchronize()

    seconds = timed(step, args.steps)
    card = torch.cuda.get_device_name() if gpu else "cpu"
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return {**rates(args.loop, rows, seconds, card), "peak_memory_gib": round(peak, 1)}


def record(
    args: argparse.Namespace, name: str, part: Part, ours: dict[str, Any], theirs: dict[str, Any]
) -> dict[str, Any]:
    packed = f"rows of {part.length} in micro-batches of {part.micro_batch}"
    more = f", {', '.join(f'{k}={v}' for k, v in part.megatron.items())}" if part.megatron else ""
    return gpu_record(
        f"trainer {name}: Qwen3-{part.model} shape, bf16, {packed}, {args.micro_batches} micro-batches per optimizer step{more}",
        ours,
        theirs or None,
        FORMULA,
        args.commit,
        speedup=round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3) if theirs.get("tokens_per_s") else None,
    )


def gpu_record(
    metric: str, value: Any, baseline: Any, formula: str, commit: str | None = None, **details: Any
) -> dict[str, Any]:
    """A result of a benchmark on GPUs. `commit`: the measured one; None: the one that is checked out."""
    return {
        "metric": metric,
        "value": value,
        "baseline": baseline,
        **details,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "formula": formula,
        "commit": commit or checked_out(),
        "command": f"python {shlex.join(sys.argv)}",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }


def checked_out() -> str | None:
    """The short hash of the commit that is checked out; None outside a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["1.7b", "0.6b", "1.7b-32k", "8b"])
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per optimizer step")
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps")
    parser.add_argument(
        "--models", type=Path, default=Path("/tmp/mfu-models"), help="where the random models are written"
    )
    parser.add_argument("--profile", action="store_true", help="also trace one step of the trainer")
    parser.add_argument("--no-loop", action="store_true", help="leave the transformers loop out")
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    for name in ("--loop-rows", "--loop-length", "--loop-count"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        print(json.dumps(loop(args)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    records: list[dict[str, Any]] = []
    for name in args.parts:
        part = PARTS[name]
        config = SHAPES[part.model]
        if args.tiny:
            part, config = Part(model=part.model, length=64, micro_batch=256, loop=part.loop[:1]), TINY
        folder = args.models / ("tiny" if args.tiny else part.model)
        if not (folder / "model.safetensors.index.json").exists():
            write_model(folder, config)
        torch.cuda.empty_cache()
        try:
            ours = measure(args, name, part, folder, card)
        except Exception as e:  # noqa: BLE001, a part that fails must not prevent the others
            print(f"{name} failed: {e}", flush=True)
            records.append({"metric": f"trainer {name}", "error": str(e)[-2000:]})
        else:
            theirs = {} if args.no_loop or not part.loop else measure_loop(args, part, folder, card)
            records.append(record(args, name, part, ours, theirs))
            print(
                name,
                layer_parameters(read_model_config(folder)),
                json.dumps(records[-1]["value"]),
                json.dumps(theirs),
                flush=True,
            )
        (args.out / "mfu.json").write_text(json.dumps(records, indent=1) + "\n")
    print(FORMULA)


if __name__ == "__main__":
    main()
