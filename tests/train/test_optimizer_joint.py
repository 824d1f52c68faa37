"""What is set of the optimizer, the precision and the seed is what the ranks use."""

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_loss, hf_model, make_model, make_rows
from safetensors.torch import load_file

from agentrl.train.base import LossConfig
from agentrl.train.megatron.trainer import MegatronTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reused_ranks")]
SETTINGS = {"weight_decay": 0.3, "adam_beta1": 0.7, "adam_beta2": 0.9, "adam_eps": 1e-3, "clip_grad": 0.5}
RATES = (1e-2, 3e-2, 5e-3)


def start(model, run_dir, **options):
    return MegatronTrainer(model, run_dir=run_dir, threads=1, timeout_s=120.0, **options)


def test_rate_and_settings_of_adam_reach_the_optimizer(tmp_path):
    """Three steps as torch's AdamW makes them; every one of the settings changes the weights by more than the tolerance."""
    model = make_model(tmp_path / "model", layers=1)
    rows, loss = make_rows(model, 3), LossConfig(kind="sft")
    with start(model, tmp_path, megatron=SETTINGS) as trainer:
        norms = [trainer.step(rows, loss, lr)["grad_norm"] for lr in RATES]
        trainer.export_weights(tmp_path / "after")
    got = load_file(tmp_path / "after/model.safetensors")
    assert min(norms) > SETTINGS["clip_grad"]
    assert distance(got, stepped(model, rows, loss, SETTINGS, RATES)) < 5e-5
    for name, usual in {
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
    }.items():
        assert distance(got, stepped(model, rows, loss, SETTINGS | {name: usual}, RATES)) > 5e-4, name
    assert distance(got, stepped(model, rows, loss, SETTINGS, (1e-2, 1e-2, 1e-2))) > 5e-4


def stepped(model, rows, loss, settings, rates):
    hf = hf_model(model)
    by_dim = [[p for p in hf.parameters() if (p.dim() > 1) is many] for many in (True, False)]
    decays = (settings["weight_decay"], 0.0)
    groups = [{"params": p, "weight_decay": d} for p, d in zip(by_dim, decays, strict=True)]
    betas = (settings["adam_beta1"], settings["adam_beta2"])
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=settings["adam_eps"])
    for lr in rates:
        optimizer.zero_grad()
        hf_loss(hf, rows, loss).backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), settings["clip_grad"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return dict(hf.named_parameters())


def distance(got, want):
    return max(float((got[n] - p.detach()).abs().max()) for n, p in want.items())


def test_dtype_and_seed_reach_the_ranks(tmp_path):
    model = make_model(tmp_path / "model", layers=1)
    rows, losses = make_rows(model), []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        with start(
            model, folder, megatron={"hidden_dropout": 0.5}, tree_packing=False, seed=seed, dtype="bfloat16"
        ) as trainer:
            losses.append(trainer.step(rows, LossConfig(kind="sft"), 0.0)["loss"])
            trainer.export_weights(folder / "weights")
        kept = load_file(folder / "weights/model.safetensors")
        assert {str(t.dtype) for t in kept.values()} == {"torch.bfloat16"}
    assert losses[0] != losses[1], "the seed decides what drops out"
