"""--true-on-policy-mode: the trainer's log-probs equal the local engine's to the last bit, and its gradients are those of transformers."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_loss, hf_model, make_model, make_rows
from safetensors.torch import load_file

from agentrl.config import build_config
from agentrl.engine.base import SamplingParams
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import ConfigError
from agentrl.train.base import LossConfig, Row
from agentrl.train.megatron.trainer import MegatronTrainer

FULL = pytest.mark.full


async def sampled(engine, index):
    """A row of two turns, with three tokens between them."""
    random = np.random.default_rng(index)
    temperature = (1.0, 0.7)[index % 2]
    tokens = random.integers(0, 90, int(random.integers(2, 80))).tolist()
    log_probs, mask = [0.0] * len(tokens), [0.0] * len(tokens)
    for turn in range(2):
        sampling = SamplingParams(12, temperature, seed=10 * index + turn, ignore_eos=True)
        generation = await engine.generate(tokens, sampling, session=str(index))
        tokens, log_probs = [*tokens, *generation.ids], [*log_probs, *generation.log_probs]
        mask += [1.0] * len(generation.ids)
        if not turn:
            tokens, log_probs, mask = [*tokens, 7, 8, 9], [*log_probs, 0.0, 0.0, 0.0], [*mask, 0.0, 0.0, 0.0]
    trained = np.array(mask, np.float32)
    return Row(
        tokens=np.array(tokens, np.int32),
        weights=trained / 200,
        advantages=(trained * random.standard_normal(len(mask))).astype(np.float32),
        rollout_log_probs=np.array(log_probs, np.float32),
        temperature=np.where(trained > 0, np.float32(temperature), np.float32(1)),
        old_log_probs=np.array(log_probs, np.float32),
    )


def sample_rows(folder, count=10):
    async def run():
        engine = LocalEngine(folder, threads=1, single_token_chunks=True)
        await engine.start()
        try:
            return await asyncio.gather(*(sampled(engine, i) for i in range(count)))
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "world"),
    [("qwen3", True, 1), pytest.param("qwen2", False, 2, marks=FULL), pytest.param("llama", True, 1, marks=FULL)],
)
def test_log_probs_are_the_engines_before_and_after_a_step_and_gradients_are_those_of_transformers(
    tmp_path, family, tied, world
):
    model = make_model(tmp_path / "model", family, tied=tied)
    options = {"true_on_policy": True, "tree_packing": False, "threads": 1, "micro_batch_tokens": 300}
    with MegatronTrainer(model, world_size=world, run_dir=tmp_path, **options) as trainer:
        rows = sample_rows(model)
        for row, values in zip(rows, trainer.log_probs(rows, trained_only=True), strict=True):
            assert values.tobytes() == row.rollout_log_probs.tobytes()

        others, loss = make_rows(model), LossConfig(eps_clip_high=0.28, kl_loss_coef=0.1, entropy_coef=0.01)
        trainer.gradients(others, loss, tmp_path / "gradients")
        hf = hf_model(model)
        hf_loss(hf, others, loss).backward()
        found = {n: t for file in (tmp_path / "gradients").glob("*.safetensors") for n, t in load_file(file).items()}
        for name, parameter in hf.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)

        metrics = trainer.step(rows, LossConfig(), 1e-2)
        assert (metrics["ratio_mean"], metrics["ratio_max"]) == (pytest.approx(1.0, abs=1e-12), 1.0)
        trainer.export_weights(tmp_path / "after")
        rows = sample_rows(tmp_path / "after")
        for row, values in zip(rows, trainer.log_probs(rows, trained_only=True), strict=True):
            assert values.tobytes() == row.rollout_log_probs.tobytes()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "sglang"}, "needs --engine local"),
        ({"schedule": "one_step_off"}, "older weights sampled"),
        ({"use_tis": True}, "--use-tis corrects a difference"),
        ({"rejection_level": "token"}, "--rejection-level corrects a difference"),
        ({"proximal_log_probs": "interpolate", "num_steps_per_rollout": 2}, "interpolate has no effect"),
    ],
)
def test_settings_that_contradict_the_mode_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_config({"true_on_policy_mode": True, **settings})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"megatron": {"tensor_model_parallel_size": 2}}, "tensor_model_parallel_size to 1"),
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"tree_packing": True}, "--tree-packing false"),
    ],
)
def test_a_trainer_that_cannot_compute_as_the_engine_is_refused(tmp_path, options, sentence):
    wanted = {"true_on_policy": True, "tree_packing": False, **options}
    with pytest.raises(ConfigError, match=sentence):
        MegatronTrainer(tmp_path, run_dir=tmp_path, **wanted)
