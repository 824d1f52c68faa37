"""The critic's ranks against transformers: values, the loss and every gradient; a checkpoint continues; a head that is missing is 0."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import numpy as np
import torch
from models import make_model, make_rows
from safetensors.torch import load_file, save_file

from agentrl.errors import DataError, InvariantError, WorkerError
from agentrl.train.base import LossConfig
from agentrl.train.megatron.trainer import MegatronTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reused_ranks")]
LOSS = LossConfig(kind="value", value_clip=0.2)
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
FULL = pytest.mark.full


def make_critic(folder: Path, *, head: bool = True, bias: float = 0.0, **kind) -> Path:
    """A tiny model with a value head that is not 0."""
    make_model(folder, **kind)
    weights = load_file(folder / "model.safetensors")
    if head:
        weights["score.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
        weights["score.bias"] = torch.full((1,), bias)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def hf_critic(folder: Path):
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def hf_values(model, row):
    """Entry t is the value of the context before token t."""
    values = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :, 0]
    return torch.cat([values.new_zeros(1), values[:-1]])


def value_rows(model: Path):
    """Rows with old values and targets some way off, so that clipping is active for some."""
    rng, made = np.random.default_rng(3), []
    for row in make_rows(model):
        mask = row.weights != 0
        near = [((0.5 * rng.standard_normal(len(mask))) * mask).astype(np.float32) for _ in range(2)]
        made.append(replace(row, values=near[0], returns=near[1]))
    return made


def start(model, run_dir, **options):
    return MegatronTrainer(model, run_dir=run_dir, threads=1, timeout_s=120.0, critic=True, **options)


def stepped(critic, rows):
    """The metrics of a step that do not depend on the clock."""
    return {name: value for name, value in critic.step(rows, LOSS, 1e-3).items() if name != "rates"}


@pytest.mark.parametrize(
    ("kind", "settings", "world"),
    [
        pytest.param({"family": "qwen3"}, {**TP2, "sequence_parallel": True}, 2, id="qwen3-tied-TP2-SP"),
        pytest.param({"family": "qwen2"}, PP2, 2, id="qwen2-tied-PP2", marks=FULL),
        pytest.param({"family": "llama", "tied": False}, {}, 2, id="llama-DP2", marks=FULL),
    ],
)
def test_values_and_gradients_equal_those_of_transformers_and_a_checkpoint_continues(tmp_path, kind, settings, world):
    model = make_critic(tmp_path / "model", **kind)
    rows, hf = value_rows(model), hf_critic(model)
    with start(model, tmp_path, megatron=settings, world_size=world, micro_batch_tokens=64) as critic:
        with torch.no_grad():
            for row, found in zip(rows, critic.values(rows), strict=True):
                want = hf_values(hf, row).numpy() * (row.weights != 0)
                np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
        critic.gradients(rows, LOSS, tmp_path / "gradients")
        total = torch.zeros(())
        for row in rows:
            v, w, old, target = (hf_values(hf, row), *map(torch.from_numpy, (row.weights, row.values, row.returns)))
            bounded = old + (v - old).clamp(-0.2, 0.2)
            total = total + (w * torch.max((v - target) ** 2, (bounded - target) ** 2) / 2).sum()
        total.backward()
        found = {}
        for file in (tmp_path / "gradients").glob("*.safetensors"):
            found |= load_file(file)
        want = {n: p.grad for n, p in hf.named_parameters() if n != "score.bias"}
        assert found.keys() == want.keys()
        errors = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in want.items()}
        assert max(errors.values()) <= 1e-5, errors
        first = critic.step(rows, LOSS, 1e-3)
        assert first["loss"] == pytest.approx(total.item(), rel=1e-5)
        assert 0 < first["clip_fraction"] < 1
        critic.save(tmp_path / "checkpoint")
        again = [stepped(critic, rows) for _ in range(2)]
        critic.load(tmp_path / "checkpoint")
        assert [stepped(critic, rows) for _ in range(2)] == again
        assert again[1]["loss"] < first["loss"]
        with pytest.raises(InvariantError, match="needs returns"):
            critic.step([replace(r, returns=None) for r in rows], LOSS, 1e-2)


def test_a_rank_without_trained_tokens_takes_part_in_a_step(tmp_path):
    model = make_critic(tmp_path / "model")
    rows = value_rows(model)[:1]
    steps = {}
    for world in (1, 2):
        with start(model, tmp_path / str(world), world_size=world) as critic:
            steps[world] = critic.step(rows, LOSS, 1e-3)
    assert steps[2]["loss"] == pytest.approx(steps[1]["loss"], rel=1e-6)
    assert steps[2]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-5)


def test_a_head_that_is_missing_is_0_and_one_with_a_bias_is_refused(tmp_path):
    model = make_critic(tmp_path / "model", head=False)
    with start(model, tmp_path / "a") as critic:
        assert not any(v.any() for v in critic.values(value_rows(model)))
    biased = make_critic(tmp_path / "biased", bias=1.0)
    with pytest.raises((DataError, WorkerError), match=r"score\.bias is not 0"):
        start(biased, tmp_path / "b")
