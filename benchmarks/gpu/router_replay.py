"""Log-probs of engine and trainer for a mixture of experts with and without router replay, through a genuine SGLang server on the same GPU.

    python benchmarks/gpu/router_replay.py --out DIR [--engine-pythonpath DIR] [--cases random] [--episodes 64]

`random` is a Qwen3-MoE of 16 layers, 64 experts, 8 of them for each token, with random weights and random prompts. `search_r1` is the embedded policy
as a mixture of 8 experts (benchmarks/moe_learning.py), or the folder --model, with questions of search_r1; SGLang 0.5.17 on a GPU does not start with
its heads of 32 channels. Episodes have two turns with an
observation of random tokens between them; both sides compute in bf16. The same rows are scored by the trainer four times: with the recorded experts,
without, with those of the token before, and in float32 with the recorded experts (`--skip-float32` leaves that out). OUT/router_replay.json has a
record {metric, value, baseline, card, formula, commit, command, date} for each case, written after each. A server that ends, or takes longer than
--start-timeout to start, ends its case. `--tiny` runs a small model on any machine that has SGLang, which checks the script.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mfu import SHAPES, TINY_MOE, gpu_record, write_model
from sglang_cycle import FLAGS

from agentrl.core.ports import free_port
from agentrl.core.routed_experts import joined
from agentrl.engine.base import SamplingParams, check_routed_experts
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.installation import find_installation
from agentrl.engine.sglang.launch_spec import LaunchSpec, check_spec, command_line
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.envs import factbook
from agentrl.errors import AgentRLError
from agentrl.render import Tokenizer
from agentrl.run.model_folder import ASSETS
from agentrl.train.base import Floats, Row
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.trainer import MegatronTrainer
from agentrl.train.rows import without_experts

sys.path.insert(0, str(Path(__file__).parents[1]))
from moe_learning import upcycle

FORMULA = (
    "d = log-prob of the trainer - log-prob of the engine, of each sampled token; mean and max of |d|; kl = mean of exp(d) - d - 1; extreme = "
    "share of tokens with exp(d) outside [1/2, 2]"
)
CASES = ("random", "search_r1")
TURNS, OBSERVATION, CONTEXT = 2, 16, 512


def make_model(case: str, args: argparse.Namespace) -> Path:
    """The model folder of a case; written unless it exists."""
    if case == "search_r1" and args.model:
        return args.model
    folder = args.models / f"replay-{case}{'-tiny' if args.tiny else ''}"
    if not (folder / "config.json").exists():
        if case == "search_r1":
            upcycle(folder)
        else:
            write_model(folder, TINY_MOE if args.tiny else SHAPES["moe"])
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(ASSETS / "search_r1_3m" / name, folder)
    return folder


def prompts(case: str, model: Path, count: int) -> list[list[int]]:
    """Token ids of the first contexts."""
    if case == "random":
        draw, vocab = random.Random(0), read_model_config(model).vocab_size
        return [[draw.randrange(10, vocab) for _ in range(64)] for _ in range(count)]
    tokenizer = Tokenizer.load(model)
    return [
        tokenizer.encode(f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n")
        for row in factbook.questions("train", limit=count)
    ]


async def episode(engine: SGLangEngine, number: int, prompt: Sequence[int], sampled: int) -> Row:
    """Sample two turns with an observation between them; the row has the engine's experts."""
    draw, vocab = random.Random(number), engine.vocab_size or 0
    context, experts = list(prompt), []
    weights, log_probs = [0.0] * len(context), [0.0] * len(context)
    for turn in range(TURNS):
        if turn:
            context += [draw.randrange(10, vocab) for _ in range(OBSERVATION)]
            weights += [0.0] * OBSERVATION
            log_probs += [0.0] * OBSERVATION
        known = sum(part.tokens for part in experts)
        sampling = SamplingParams(sampled, ignore_eos=True, routed_experts_from=known)
        generation = await engine.generate(context, sampling, session=str(number))
        check_routed_experts(generation, sampling, len(context))
        assert generation.routed_experts is not None
        experts.append(generation.routed_experts)
        context += generation.ids
        weights += [1.0] * len(generation.ids)
        log_probs += generation.log_probs
    recorded = joined(experts)
    assert recorded is not None
    return Row(
        tokens=np.array(context, np.int32),
        weights=np.array(weights, np.float32),
        advantages=np.zeros(len(context), np.float32),
        rollout_log_probs=np.array(log_probs, np.float32),
        temperature=np.ones(len(context), np.float32),
        routed_experts=recorded.array(),
    )


async def sample(case: str, model: Path, args: argparse.Namespace) -> tuple[list[Row], str]:
    """Rows that a server of its own sampled, and the server's version. The server has ended when this returns."""
    installation = find_installation(args.engine_python, [args.engine_pythonpath] if args.engine_pythonpath else [])
    flags = {} if args.tiny else {**FLAGS, "mem_fraction_static": 0.4, "moe_runner_backend": "triton"}
    spec = LaunchSpec(model=model, dtype="bfloat16", context_length=CONTEXT, routed_experts=True, args=flags)
    check_spec(spec, installation)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = command_line(spec, installation, 0, port)
    process = ServerProcess(command, installation.environment, args.out / f"engine_{case}.log", address)
    process.start()
    try:
        await process.wait_ready(args.start_timeout)
        engine = SGLangEngine(
            address,
            model_dir=model,
            router=read_model_config(model).router,
            context_length=CONTEXT,
            generate_timeout_s=args.start_timeout,
        )
        await engine.start()
        try:
            starts = prompts(case, model, args.episodes)
            rows = await asyncio.gather(*(episode(engine, i, ids, args.sampled) for i, ids in enumerate(starts)))
            return list(rows), engine.api.facts.version
        finally:
            await engine.close()
    finally:
        await process.stop()


def distance(rows: Sequence[Row], log_probs: Sequence[Floats]) -> dict[str, float]:
    """Differences to the engine's log-probs, see FORMULA."""
    pairs = zip(rows, log_probs, strict=True)
    d = np.concatenate([(own - row.rollout_log_probs)[row.weights > 0] for row, own in pairs]).astype(np.float64)
    extreme = np.abs(d) > np.log(2)
    return {
        "mean": float(np.abs(d).mean()),
        "max": float(np.abs(d).max()),
        "kl": float((np.exp(d) - d - 1).mean()),
        "extreme": float(extreme.mean()),
        "tokens": len(d),
    }


def score(rows: list[Row], model: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Differences between the engine and the trainer, by what the trainer replays."""
    moved = [replace(row, routed_experts=np.roll(row.routed_experts, 1, axis=0)) for row in rows]
    cases = {"replay": rows, "without": without_experts(rows), "experts of the token before": moved}
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    options = {"run_dir": args.out, "timeout_s": 240.0, "micro_batch_tokens": 8192}
    with MegatronTrainer(model, dtype=dtype, **options) as trainer:
        found = {name: distance(rows, trainer.log_probs(given, trained_only=True)) for name, given in cases.items()}
    if dtype == "bfloat16" and not args.skip_float32:
        gc.collect()
        with MegatronTrainer(model, dtype="float32", **options) as trainer:
            for name in ("replay", "without"):
                found[f"{name}, trainer in float32"] = distance(rows, trainer.log_probs(cases[name], trained_only=True))
    return found


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Sample and score; the record."""
    started = time.perf_counter()
    model = make_model(case, args)
    rows, version = asyncio.run(sample(case, model, args))
    sampled_s = time.perf_counter() - started
    found = score(rows, model, args)
    router = read_model_config(model).router
    shape = f"Qwen3-MoE, {router.layers} layers, {router.experts} experts, {router.topk} of them for each token"
    return gpu_record(
        f"difference of log-probs between SGLang and the trainer with router replay, {case}: {shape}",
        found["replay"],
        found["without"],
        FORMULA,
        args.commit,
        all=found,
        sglang=version,
        seconds={"sample": round(sampled_s, 1), "score": round(time.perf_counter() - started - sampled_s, 1)},
    )


def main() -> int:
    """Measure every case; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: random; with --tiny all")
    parser.add_argument("--model", type=Path, help="model folder of the case search_r1")
    parser.add_argument("--engine-python", help="the interpreter that has SGLang (default: as for agentrl train)")
    parser.add_argument("--engine-pythonpath", help="folder with SGLang, for the server's process alone")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--sampled", type=int, default=128, help="tokens of a turn")
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds until a server must be ready")
    parser.add_argument("--models", type=Path, default=Path("/tmp/mfu-models"), help="where models are written")
    parser.add_argument("--skip-float32", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    for case in args.cases or (CASES if args.tiny else CASES[:1]):
        try:
            records.append(measure(case, args))
            print(case, json.dumps(records[-1]["all"]), flush=True)
        except AgentRLError as e:
            records.append({"metric": f"router replay, {case}", "error": str(e)[-3000:]})
            print(f"{case} failed: {e}", flush=True)
        (args.out / "router_replay.json").write_text(json.dumps(records, indent=1) + "\n")
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
