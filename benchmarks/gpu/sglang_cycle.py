"""SGLang and the trainer on one or two GPUs: sync timings compared with a raw probe, memory by stage, log-prob differences, throughput.

    python benchmarks/gpu/sglang_cycle.py --model DIR --out DIR [--probes DIR] [--engine-pythonpath DIR] [--split]

It writes OUT/sglang_cycle.json after every part, so that an interrupted run keeps its results. `--probes` holds sync.py and sync_nccl.py, raw
scripts that do the same without agentrl; they run before it on the same servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from agentrl import Env
from agentrl.engine.base import Generation, SamplingParams
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.installation import find_installation
from agentrl.engine.sglang.launch_spec import LaunchSpec, check_spec, command_line
from agentrl.engine.sglang.members import Member
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.render import Renderer, Tokenizer, make_renderer
from agentrl.reward import Scorer
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import EpisodeRunner, Limits
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import EpisodeWriter
from agentrl.train.base import LossConfig, Row, Trainer
from agentrl.train.megatron.trainer import MegatronTrainer
from agentrl.types import Action, EpisodeSpec, FinishReason, StepResult, Task
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.broadcast import BroadcastSync
from agentrl.weight_sync.colocated import ColocatedSync

FLAGS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_custom_all_reduce": True,
    "disable_prefill_cuda_graph": True,
}
REPEATS = 4


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(sys.argv),
            "parts": {},
            "errors": {},
        }
        self.began = time.perf_counter()

    def keep(self, name: str, value: Any) -> None:
        self.result["parts"][name] = value
        self.result["seconds"] = round(time.perf_counter() - self.began, 1)
        (self.args.out / "sglang_cycle.json").write_text(json.dumps(self.result, indent=1) + "\n")
        print(f"[{self.result['seconds']}] {name}: {json.dumps(value)[:900]}", flush=True)

    async def part(self, name: str, work: Any) -> None:
        try:
            self.keep(name, await work)
        except Exception as e:  # noqa: BLE001, a failed part must not prevent the others
            self.result["errors"][name] = f"{type(e).__name__}: {e}"[:2000]
            self.keep(name, None)
            print(f"{name} failed: {self.result['errors'][name]}", flush=True)


def fleet_on(args: argparse.Namespace, number: int) -> Fleet:
    installation = find_installation(sys.executable, [args.engine_pythonpath] if args.engine_pythonpath else [])
    flags = {**FLAGS, "mem_fraction_static": args.mem_fraction, "port": args.port + number}
    spec = LaunchSpec(
        model=args.model,
        dtype="bfloat16",
        context_length=8192,
        first_gpu=number,
        memory_saver=number == 0,
        args=flags,
    )
    check_spec(spec, installation)
    address = f"http://127.0.0.1:{args.port + number}"
    command = command_line(spec, installation, 0, args.port + number)
    process = ServerProcess(command, installation.environment, args.out / f"engine{number}.log", address)
    return Fleet([Member(SGLangEngine(address, model_dir=args.model, context_length=8192), process)])


def rows(vocab: int, count: int = 8, length: int = 512) -> list[Row]:
    draw, out = np.random.default_rng(0), []
    for _ in range(count):
        weights = np.full(length, 1 / count / length, np.float32)
        weights[0] = 0
        zeros = np.zeros(length, np.float32)
        ids = draw.integers(10, vocab, length).astype(np.int32)
        ones = np.ones(length, np.float32)
        out.append(Row(tokens=ids, weights=weights, advantages=zeros, rollout_log_probs=zeros, temperature=ones))
    return out


def probe(args: argparse.Namespace, script: str, pattern: str, port: int) -> list[dict[str, float]]:
    text = (args.probes / script).read_text().replace("30000", str(port))
    path = args.out / f"probe_{script}"
    path.write_text(text)
    env = dict(os.environ, PYTHONPATH=args.engine_pythonpath or "", NCCL_CUMEM_ENABLE="0")
    done = subprocess.run(
        [sys.executable, str(path), str(args.model)], capture_output=True, text=True, env=env, timeout=120
    )
    path.unlink()
    found = [{"GB": float(m[1]), "s": float(m[2]), "GB/s": float(m[3])} for m in re.finditer(pattern, done.stdout)]
    if not found:
        raise RuntimeError(f"{script}: {done.stdout[-600:]} {done.stderr[-600:]}")
    return found


async def syncs(
    sync: WeightSync, trainer: Trainer, fleet: Fleet, batch: list[Row], version: list[int], *, cycle: bool
) -> list[dict[str, Any]]:
    """Run REPEATS times: an optimizer step if there are rows, then a sync. `cycle`: engine and trainer share the GPU."""
    out = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        if cycle:
            await sync.yield_gpu(trainer)
        lent = time.perf_counter()
        if batch:
            await asyncio.to_thread(trainer.step, batch, LossConfig(kind="sft"), 1e-4)
        stepped = time.perf_counter()
        version[0] += 1
        await sync.sync(trainer, version[0])
        done = time.perf_counter()
        seconds = {k: round(v, 4) for k, v in sync.seconds.items()}
        rate = sync.bytes / 1e9 / sync.seconds["update_s"]
        out.append(
            {
                "lend_s": round(lent - started, 3),
                "step_s": round(stepped - lent, 3),
                "sync_s": round(done - stepped, 3),
                "GB": sync.bytes / 1e9,
                "GB/s": round(rate, 1),
                "log_prob_diff_max": sync.difference,
                **seconds,
                **sync.memory(),
            }
        )
    return out


async def differences(trainer: Trainer, fleet: Fleet, model: Path, vocab: int) -> dict[str, float]:
    """Differences of sampled tokens' log-probs: the engine's from the trainer's, and from those of transformers with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    draw = random.Random(1)
    prompts = [[draw.randrange(10, vocab) for _ in range(64)] for _ in range(16)]
    answers = await asyncio.gather(
        *(fleet.generate(p, SamplingParams(64, ignore_eos=True), session=f"d{i}") for i, p in enumerate(prompts))
    )
    batch = []
    for p, g in zip(prompts, answers, strict=True):
        ids = np.array([*p, *g.ids], np.int32)
        w, z = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
        w[0] = 0
        batch.append(
            Row(tokens=ids, weights=w, advantages=z, rollout_log_probs=z, temperature=np.ones(len(ids), np.float32))
        )
    said = np.array([g.log_probs for g in answers])
    ours = np.array([lp[64:] for lp in await asyncio.to_thread(trainer.log_probs, batch)])
    folder = model.parent / "exported"
    if not folder.exists():
        await asyncio.to_thread(trainer.export_weights, folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        ids = torch.tensor(np.array([r.tokens for r in batch]), device="cuda").long()
        logits = plain(ids).logits[:, :-1].float()
        lp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    theirs = lp[:, 63:].cpu().numpy()
    a, b = np.abs(said - ours), np.abs(said - theirs)
    return {
        "trainer_mean": float(a.mean()),
        "trainer_max": float(a.max()),
        "transformers_mean": float(b.mean()),
        "transformers_max": float(b.max()),
        "mean_ratio": float(a.mean() / b.mean()),
    }


TURNS, SAMPLED, EPISODES = 4, 64, 256
WORDS = "river census capital harbour treaty island export railway border climate parliament currency mountain festival".split()


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


class Endless:
    """A fleet whose generations report finish reason STOP: a model with random weights never samples an end of turn."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)

    async def generate(self, ids: Sequence[int], sampling: SamplingParams, **more: Any) -> Generation:
        answer = await self.fleet.generate(ids, sampling, **more)
        return replace(answer, finish_reason=FinishReason.STOP)


class Talk(Env):
    """Four turns with random observations."""

    def __init__(self) -> None:
        self.draw = random.Random(0)

    async def reset(self, task: Task, *, seed: int) -> str:
        self.draw.seed(seed)
        return words(self.draw, 220)

    async def step(self, action: Action) -> StepResult:
        return StepResult(words(self.draw, 30), terminated=False)


async def product(fleet: Fleet, renderer: Renderer, seed: int, folder: Path) -> tuple[float, list[list[list[int]]]]:
    """Run 256 concurrent, recorded episodes; returns sampled tokens per second and every context that was sent."""
    limits = Limits(max_turns=TURNS, max_response_tokens=4096, context_length=8192, max_tokens_per_turn=SAMPLED)
    sampling = SamplingParams(SAMPLED, ignore_eos=True)
    engine: Any = Endless(fleet)
    runner = EpisodeRunner(
        make_env=Talk,
        env_class=Talk,
        engine=engine,
        renderer=renderer,
        scorer=Scorer([]),
        limits=limits,
        sampling=sampling,
        seed=seed,
        pools=ThreadPools(Talk),
    )
    specs = [[EpisodeSpec(Task(str(n), ""), n, n)] for n in range(EPISODES)]
    writer = EpisodeWriter(folder / f"talk{seed}")
    started = time.perf_counter()
    rollout = Rollout(runner, RolloutLimits(concurrency=EPISODES, min_group_size=1))
    groups, table = await rollout.run(specs, progress=writer.write)
    writer.close()
    seconds = time.perf_counter() - started
    runner.close()
    if table.failures:
        raise RuntimeError(str(table))
    trajectories = [t for g in groups for t in g.trajectories]
    contexts = []
    for t in trajectories:
        ids: list[int] = []
        sent: list[list[int]] = []
        for span in t.segments[0].spans:
            if span.log_probs is not None:
                sent.append(list(ids))
            ids += span.ids
        contexts.append(sent)
    sampled = sum(t.sampled_tokens for t in trajectories)
    # the engine stops at an end of turn, about one token in several thousand
    if sampled < 0.99 * EPISODES * TURNS * SAMPLED or {len(c) for c in contexts} != {TURNS}:
        raise RuntimeError(f"{sampled} tokens were sampled in {[len(c) for c in contexts][:8]} … turns")
    return sampled / seconds, contexts


async def raw(address: str, contexts: list[list[list[int]]]) -> float:
    """Sampled tokens per second of a minimal client with the same contexts and lengths."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def episode(turns: list[list[int]]) -> None:
            for ids in turns:
                body = {
                    "input_ids": ids,
                    "sampling_params": {"temperature": 1.0, "max_new_tokens": SAMPLED, "ignore_eos": True},
                    "return_logprob": True,
                }
                async with session.post(
                    f"{address}/generate", data=orjson.dumps(body), headers={"Content-Type": "application/json"}
                ) as r:
                    await r.read()

        started = time.perf_counter()
        await asyncio.gather(*(episode(t) for t in contexts))
        return EPISODES * TURNS * SAMPLED / (time.perf_counter() - started)


async def throughput(fleet: Fleet, renderer: Renderer, folder: Path) -> dict[str, Any]:
    """Alternate the two, with an empty cache before each run; the first run of each is a warm-up."""
    ours, theirs = [], []
    engine = fleet.members[0].engine
    for n in range(4):
        await engine.api.flush_cache()
        rate, contexts = await product(fleet, renderer, n, folder)
        await engine.api.flush_cache()
        base = await raw(engine.address, contexts)
        if n:
            ours.append(round(rate))
            theirs.append(round(base))
    tokens = sum(len(c[-1]) for c in contexts) / EPISODES
    found = {"runner_tok_s": ours, "raw_tok_s": theirs, "last_context_tokens": round(tokens)}
    return {**found, "ratio_of_medians": sorted(ours)[1] / sorted(theirs)[1]}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--probes", type=Path)
    parser.add_argument("--engine-pythonpath")
    parser.add_argument("--split", action="store_true", help="also on a second card")
    parser.add_argument(
        "--mem-fraction", type=float, default=0.4, help="of the card, for an engine's weights and cache"
    )
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[512], help="each is measured")
    parser.add_argument("--port", type=int, default=30000, help="of the first engine")
    parser.add_argument(
        "--sync-only", action="store_true", help="no steps, no turns: for a model whose optimizer has no room"
    )
    parser.add_argument(
        "--contract", action="store_true", help="run tests/engine/test_sglang.py against the first server"
    )
    args = parser.parse_args()
    bench = Bench(args)
    import torch

    bench.result |= {"card": torch.cuda.get_device_name(0), "torch": torch.__version__}
    config = json.loads((args.model / "config.json").read_text())
    vocab = config["vocab_size"]
    fleets = [fleet_on(args, n) for n in range(2 if args.split else 1)]
    trainer: Trainer | None = None
    try:
        started = time.perf_counter()

        def make() -> Trainer:
            return MegatronTrainer(args.model, dtype="bfloat16", run_dir=args.out, micro_batch_tokens=4096)

        trainer, *_ = await asyncio.gather(asyncio.to_thread(make), *(f.start() for f in fleets))
        facts = fleets[0].members[0].engine.api.facts
        bench.result |= {
            "sglang": facts.version,
            "checksums": facts.checksums,
            "model": f"{config['model_type']}, {config['hidden_size']}x{config['num_hidden_layers']}",
        }
        bench.keep("start_s", round(time.perf_counter() - started, 1))
        await measure(bench, args, trainer, fleets, vocab)
    finally:
        await asyncio.gather(*(f.close() for f in fleets))
        if trainer is not None:
            await asyncio.to_thread(trainer.close)


async def measure(bench: Bench, args: argparse.Namespace, trainer: Trainer, fleets: list[Fleet], vocab: int) -> None:
    batch, version = [] if args.sync_only else rows(vocab), [0]
    first = fleets[0]
    if args.contract:
        await bench.part("contract", contract(args, first))
    if args.probes:
        await bench.part(
            "colocated_probe",
            asyncio.to_thread(probe, args, "sync.py", r"ipc sync ([\d.]+) GB in ([\d.]+) s = ([\d.]+) GB/s", args.port),
        )
    sync = ColocatedSync(first, share_gpus=not args.sync_only)
    await sync.begin(trainer)
    first.policy_version = -1  # the probe may have left other weights
    for mib in args.bucket_mib:
        sync.bucket_bytes = mib << 20
        work = syncs(sync, trainer, first, batch, version, cycle=not args.sync_only)
        await bench.part(f"colocated, buckets of {mib} MiB", work)
    if not args.sync_only:
        await bench.part("differences", differences_on(sync, trainer, first, args.model, vocab))
        renderer = make_renderer(Tokenizer.load(args.model))
        await bench.part("throughput", throughput(first, renderer, args.out))
    sync.close()
    if len(fleets) > 1:
        if args.probes:
            await bench.part(
                "split_probe",
                asyncio.to_thread(
                    probe,
                    args,
                    "sync_nccl.py",
                    r"nccl flattened_bucket sync ([\d.]+) GB in ([\d.]+) s = ([\d.]+) GB/s",
                    args.port + 1,
                ),
            )
        await asyncio.to_thread(trainer.onload)
        split, version = BroadcastSync(fleets[1], timeout_s=60), [100]
        await split.begin(trainer)
        for mib in args.bucket_mib:
            split.bucket_bytes = mib << 20
            await bench.part(
                f"split, buckets of {mib} MiB", syncs(split, trainer, fleets[1], batch, version, cycle=False)
            )
        split.close()


async def differences_on(
    sync: ColocatedSync, trainer: Trainer, fleet: Fleet, model: Path, vocab: int
) -> dict[str, float]:
    """With the trainer's memory loaded beside the engine's."""
    assert sync.sharing is not None
    await sync.sharing.onload(trainer)
    try:
        return await differences(trainer, fleet, model, vocab)
    finally:
        await sync.sharing.offload(trainer)


async def contract(args: argparse.Namespace, fleet: Fleet) -> str:
    """Run the contract suite against the running server in a separate process."""
    env = dict(os.environ, AGENTRL_SGLANG=fleet.members[0].engine.address, AGENTRL_SGLANG_MODEL=str(args.model))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "tests/engine/test_sglang.py",
    ]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=env, timeout=150)
    print(done.stdout[-3000:], done.stderr[-500:], flush=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]


if __name__ == "__main__":
    asyncio.run(main())
