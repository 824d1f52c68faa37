"""Forward and backward over token trees against the same rows packed one by one, on one GPU, with the head and without the optimizer.

    python benchmarks/gpu/tree.py --out DIR [--parts prompt turns] [--heads trained all] [--groups 2] [--max-tokens 20480] [--steps 5] [--profile]

`prompt` is two groups, which fill a micro-batch of trees: in each, 8 answers of 1,024 tokens to a prompt of 2,048. `turns` is an episode whose
thinking is stripped from its history: 20 turns of 400 tokens, of which the history keeps 320, after a prompt of 4,096; one row for each turn. The
model has random weights in the shape of Qwen3-1.7B, bf16. Log-probs are computed for the trained tokens (the answers; what training does) or for
all tokens. Both sides are our own trainer with the same settings except --tree-packing, run in turns in one process; the median counts.
OUT/tree.json has a record {metric, value, baseline, card, formula, commit, command, date} for each, written after each. --profile prints the kernels
that take longest. `--tiny` runs the same on any machine, which checks the script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from mfu import gpu_record

from agentrl.core.ports import free_port
from agentrl.train.base import LossConfig, Row
from agentrl.train.batch_plan import batch_plan, input_tokens
from agentrl.train.megatron.rank_pool import RankSetup
from agentrl.train.megatron.rank_process import join_process_group

FORMULA = (
    "speedup = seconds of forward and backward of the packed rows / seconds of the tree, medians; token ratio = input tokens of the rows / unique "
    "tokens of the tree"
)
WARM_UP = 2
"""Runs that are not timed: kernels are compiled, memory is allocated."""
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "vocab_size": 151936,
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}


def prompt_rows(scale: int, vocab: int, seed: int) -> list[np.ndarray]:
    """Tokens of 8 answers to one prompt."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(0, vocab, 2048 // scale)
    return [np.concatenate([prompt, draw.integers(0, vocab, 1024 // scale + 1)]) for _ in range(8)]


def turn_rows(scale: int, vocab: int, seed: int) -> list[np.ndarray]:
    """Tokens of the segments of an episode of 20 turns whose thinking is stripped."""
    draw = np.random.default_rng(seed)
    history = draw.integers(0, vocab, (4096 + 20 * 320) // scale)
    prefixes = [history[: (4096 + turn * 320) // scale] for turn in range(20)]
    return [np.concatenate([prefix, draw.integers(0, vocab, 400 // scale + 1)]) for prefix in prefixes]


PARTS = {"prompt": (prompt_rows, 1024), "turns": (turn_rows, 400)}
"""Makes the rows; tokens that each row trains."""


def make_rows(part: str, head: str, scale: int, vocab: int, groups: int) -> list[Row]:
    make, trained = PARTS[part]
    rows = []
    for number, tokens in enumerate(tokens for group in range(groups) for tokens in make(scale, vocab, group)):
        weights = np.zeros(len(tokens), np.float32)
        weights[1 if head == "all" else -(trained // scale) :] = 1e-4
        zeros = np.zeros(len(tokens), np.float32)
        advantages = np.where(weights > 0, np.float32(1 - number % 3), zeros).astype(np.float32)
        temperature = np.ones(len(tokens), np.float32)
        row = Row(
            tokens=tokens.astype(np.int32),
            weights=weights,
            advantages=advantages,
            rollout_log_probs=zeros,
            temperature=temperature,
        )
        rows.append(row)
    return rows


def start_rank(args: argparse.Namespace) -> Any:
    """The trainer's only rank, in this process."""
    import torch

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    gpu = torch.cuda.is_available()
    setup = RankSetup(
        model=args.model,
        megatron={},
        dtype="bfloat16" if gpu else "float32",
        reference=False,
        critic=False,
        lora=None,
        true_on_policy=False,
        tree_packing=True,
        seed=0,
        threads=torch.get_num_threads(),
        rank=0,
        local_rank=0,
        world=1,
        host="127.0.0.1",
        port=free_port(),
        timeout_s=600.0,
    )
    write_model(args.model, TINY if args.tiny else SHAPE)
    join_process_group(setup)
    from agentrl.train.megatron.rank import TrainerRank

    return TrainerRank(setup)


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """Write a Hugging Face folder with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if (folder / "config.json").exists():
        return
    fixed = {
        "num_key_value_heads": shape["num_attention_heads"] // 2,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    config = Qwen3Config(
        **shape, **fixed, head_dim=shape["hidden_size"] // shape["num_attention_heads"], rms_norm_eps=1e-6
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to("cpu").save_pretrained(folder)


class Side:
    """The rows as trees, or one by one."""

    def __init__(self, rank: Any, rows: list[Row], max_tokens: int, *, tree: bool) -> None:
        self.rank, self.tree = rank, tree
        self.share = (rows, batch_plan([r.tokens for r in rows], 1, max_tokens, tree=tree)[0])
        self.tokens = sum(input_tokens([rows[i].tokens for i in part], tree=tree) for part in self.share[1])
        self.seconds: list[float] = []
        self.loss = 0.0

    def run(self) -> None:
        """Forward and backward of all micro-batches, timed."""
        import torch

        self.rank.tree_packing = self.tree
        torch.cuda.synchronize()
        started = time.perf_counter()
        totals = self.rank._forward_backward(self.share, LossConfig())
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.loss = totals["sums"][0]

    def gradients(self) -> list[Any]:
        """Copies of the gradients of one more run."""
        self.run()
        return [p.main_grad.clone() for p in self.rank.built.wrapped.parameters()]

    def result(self) -> dict[str, Any]:
        """Median seconds, tokens, micro-batches and loss."""
        seconds = statistics.median(self.seconds[WARM_UP:])
        parts = len(self.share[1])
        return {"seconds": round(seconds, 5), "tokens": self.tokens, "micro_batches": parts, "loss": self.loss}


def measure(args: argparse.Namespace, rank: Any, part: str, head: str) -> dict[str, Any]:
    """Both sides, in turns."""
    import torch

    groups = args.groups if part == "prompt" else 1
    rows = make_rows(part, head, 16 if args.tiny else 1, (TINY if args.tiny else SHAPE)["vocab_size"], groups)
    sides = [Side(rank, rows, args.max_tokens, tree=tree) for tree in (True, False)]
    for _ in range(WARM_UP + args.steps):
        for side in sides:
            side.run()
    tree, plain = (side.result() for side in sides)
    tree["gradient_difference"] = difference(*(side.gradients() for side in sides))
    if args.profile:
        with torch.profiler.profile() as profile:
            sides[0].run()
        print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=80))
    ratio = plain["tokens"] / tree["tokens"]
    shape = "tiny" if args.tiny else "Qwen3-1.7B shape, bf16"
    case = f"{part} ({groups} group{'s' * (groups > 1)})" if part == "prompt" else part
    return gpu_record(
        f"tree speedup, {case}, token ratio {ratio:.2f}, log-probs of {head} tokens, {shape}, forward and backward without optimizer",
        round(plain["seconds"] / tree["seconds"], 3),
        plain,
        FORMULA,
        args.commit,
        tree=tree,
    )


def difference(gradients: list[Any], others: list[Any]) -> float:
    """Norm of the difference relative to the norm, over all parameters."""
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(gradients, others, strict=True)]
    return float((sum(d for d, _ in squares) / sum(n for _, n in squares)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--heads", nargs="+", choices=["trained", "all"], default=["trained", "all"])
    parser.add_argument("--groups", type=int, default=2, help="groups of `prompt`; `turns` is one episode")
    parser.add_argument("--max-tokens", type=int, default=20480, help="of a micro-batch, on both sides")
    parser.add_argument("--steps", type=int, default=5, help="timed runs of each side")
    parser.add_argument("--model", type=Path, default=Path("/tmp/tree-model"), help="where the random model is written")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one run over the trees")
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rank = start_rank(args)
    records = []
    for part in args.parts:
        for head in args.heads:
            records.append(measure(args, rank, part, head))
            print(json.dumps(records[-1]), flush=True)
            (args.out / "tree.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
