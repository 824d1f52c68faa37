"""Router replay with a genuine SGLang server on a CPU: a tiny Qwen3-MoE that computes in bf16, and the trainer in fp32."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sglang_server import available, python

pytest.importorskip("megatron.core", reason="needs megatron-core")
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import shutil

from models import make_model
from safetensors.torch import load_file, save_file

from agentrl.core.ports import free_port
from agentrl.core.routed_experts import joined
from agentrl.engine.base import SamplingParams, check_routed_experts
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.installation import find_installation
from agentrl.engine.sglang.launch_spec import LaunchSpec, command_line
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.run.model_folder import ASSETS
from agentrl.train.base import Row
from agentrl.train.megatron.model_config import read_model_config
from agentrl.train.megatron.trainer import MegatronTrainer
from agentrl.train.rows import without_experts

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.full,
    pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu"),
]
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "head_dim": 32, "layers": 3}


@pytest.fixture
def model(tmp_path):
    """With weights that bf16 holds exactly, so that engine and trainer have the same."""
    folder = make_model(tmp_path / "model", "qwen3_moe", vocab=256, tied=False, **SHAPE)
    file = folder / "model.safetensors"
    save_file({n: t.bfloat16().float() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "search_r1_3m" / name, folder)
    return folder


@pytest.fixture
async def engine(model, tmp_path):
    installation = find_installation(python())
    spec = LaunchSpec(model=model, dtype="bfloat16", context_length=120, routed_experts=True)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = command_line(spec, installation, 0, port)
    process = ServerProcess(command, installation.environment, tmp_path / "engine.log", address)
    process.start()
    try:
        await process.wait_ready()
        engine = SGLangEngine(address, model_dir=model, router=read_model_config(model).router, context_length=120)
        await engine.start()
        yield engine
        await engine.close()
    finally:
        await process.stop()


async def episode(engine, number):
    """Two turns as a row: a prompt, sampled tokens, an observation of three tokens, sampled tokens."""
    context, experts = [3, 5, 7 + number % 2], []
    weights, log_probs = [0.0] * 3, [0.0] * 3
    for turn in range(2):
        known = sum(part.tokens for part in experts)
        sampling = SamplingParams(40, ignore_eos=True, routed_experts_from=known)
        generation = await engine.generate(context, sampling, session=str(number))
        check_routed_experts(generation, sampling, len(context))
        experts.append(generation.routed_experts)
        context, weights = [*context, *generation.ids], weights + [1.0] * 40
        log_probs += generation.log_probs
        if turn == 0:
            context, weights, log_probs = [*context, 11, 12, 13], weights + [0.0] * 3, log_probs + [0.0] * 3
    arrays = {
        "weights": np.array(weights, np.float32),
        "advantages": np.zeros(len(context), np.float32),
        "rollout_log_probs": np.array(log_probs, np.float32),
        "temperature": np.ones(len(context), np.float32),
    }
    return Row(tokens=np.array(context, np.int32), routed_experts=joined(experts).array(), **arrays)


@pytest.mark.usefixtures("reused_ranks")
async def test_replay_brings_the_trainers_log_probs_closer_to_the_engines(engine, model, tmp_path):
    rows = [await episode(engine, number) for number in range(6)]

    def distance(log_probs):
        pairs = zip(rows, log_probs, strict=True)
        return np.concatenate([np.abs(own - row.rollout_log_probs)[row.weights > 0] for row, own in pairs])

    with MegatronTrainer(model, run_dir=tmp_path, threads=1, timeout_s=120.0) as trainer:
        replayed = distance(trainer.log_probs(rows, trained_only=True))
        free = distance(trainer.log_probs(without_experts(rows), trained_only=True))
        moved = [replace(row, routed_experts=np.roll(row.routed_experts, 1, axis=0)) for row in rows]
        shifted = distance(trainer.log_probs(moved, trained_only=True))
    print(
        f"mean |difference| of log-probs: {replayed.mean():.5f} replayed, {free.mean():.5f} without, {shifted.mean():.5f} shifted"
    )
    print(f"largest: {replayed.max():.5f} replayed, {free.max():.5f} without")
    assert replayed.mean() < free.mean()
    assert shifted.mean() > 5 * replayed.mean(), "experts belong to their own token"
