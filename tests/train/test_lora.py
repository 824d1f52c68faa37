"""Adapters against autograd and peft: loss, gradients of A and B, steps, merged weights, files, checkpoints, and what is refused."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from models import hf_log_probs, hf_loss, hf_model, make_model, make_rows
from safetensors import safe_open
from safetensors.torch import save_file
from test_megatron import EVERYTHING, PP2, TP2, read, start
from torch.distributed.checkpoint import FileSystemReader

from agentrl.cli.main import main
from agentrl.config import LoraSettings, build_config
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.engine.base import SamplingParams
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import ConfigError, DataError, StoreError
from agentrl.run.trained_adapters import trained_adapters
from agentrl.train.base import LossConfig
from agentrl.train.megatron.delivery.server_checksums import COMPARABLE, ServerLayout, server_checksums
from agentrl.train.megatron.lora import describe, resolve
from agentrl.train.megatron.model_config import read_model_config

ranks = pytest.mark.usefixtures("reused_ranks")
FULL = pytest.mark.full
SP, CP2 = {"sequence_parallel": True}, {"context_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
RANK, ALPHA = 4, 6


def make_adapter(folder: Path, model: Path, targets=ALL, **options) -> Path:
    """An adapter that peft saved, with random A and B."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(hf_model(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    return folder


def by_hand(model: Path, adapter: Path):
    """transformers' model with W + alpha / r · B A in place of each W, and the leaves A and B by the names in peft's file."""
    hf, leaves = hf_model(model).requires_grad_(False), read(adapter)
    for tensor in leaves.values():
        tensor.requires_grad_(True)
    for name in [n for n in leaves if "lora_A" in n]:
        module = hf.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        module.base, module.a, module.b = module.weight.data, leaves[name], leaves[name.replace("lora_A", "lora_B")]
        del module.weight
        module.register_forward_pre_hook(lambda m, _: setattr(m, "weight", m.base + ALPHA / RANK * (m.b @ m.a)))
    return hf, leaves


def peft_log_probs(model: Path, adapter: Path, rows):
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(hf_model(model), adapter)
    with torch.no_grad():
        return [hf_log_probs(adapted, row).numpy() for row in rows]


def assert_close(got, want, tolerance=2e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


LAYOUTS = [
    pytest.param("qwen3", {}, 1, True, ALL, id="one-rank-trees", marks=FULL),
    pytest.param("qwen2", {**TP2, **SP}, 2, True, ALL, id="TP2-SP-trees"),
    pytest.param("qwen2", PP2, 2, False, ALL, id="PP2-rows", marks=FULL),
    pytest.param("llama", TP2, 2, False, ALL, id="TP2-rows", marks=FULL),
    pytest.param("qwen3", PP2, 2, True, ALL, id="PP2-trees", marks=FULL),
    pytest.param("qwen3", {**TP2, **PP2}, 4, True, ALL, id="TP2-PP2-trees", marks=FULL),
    pytest.param("qwen2", {**TP2, **PP2, **SP}, 4, False, ALL, id="TP2-SP-PP2-rows", marks=FULL),
    pytest.param("qwen3", CP2, 2, True, ALL, id="CP2-trees", marks=FULL),
    pytest.param("llama", {"overlap_grad_reduce": True, "overlap_param_gather": True}, 2, True, ALL, id="DP2-overlap", marks=FULL),
    pytest.param("qwen3", {**TP2, **SP, **RECOMPUTED}, 2, True, ALL, id="TP2-SP-recomputed", marks=FULL),
    pytest.param("qwen3", {"recompute_granularity": "selective"}, 1, True, ALL, id="selective", marks=FULL),
    pytest.param("qwen3", TP2, 2, True, ("k_proj", "up_proj"), id="TP2-parts-of-joined", marks=FULL),
    pytest.param("qwen3", {**TP2, **SP}, 2, True, ("v_proj", "q_proj", "gate_proj", "o_proj"), id="TP2-SP-others", marks=FULL),
    pytest.param("glm4", {**TP2, **SP}, 2, True, (*ATTENTION, "down_proj"), id="glm4-TP2-SP", marks=FULL),
    pytest.param("qwen3_moe", {"expert_model_parallel_size": 2}, 2, True, ATTENTION, id="qwen3_moe-EP2", marks=FULL),
]  # fmt: skip


@ranks
@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "world", "tree", "targets"), LAYOUTS)
def test_a_layout_equals_autograd(tmp_path, family, settings, world, tree, targets):
    """Log-probs, loss and gradients of A and B; the merged weights; the reference; and the adapter's file, bit for bit."""
    model = make_model(tmp_path / "model", family, **({"tied": False} if family in ("glm4", "qwen3_moe") else {}))
    adapter = make_adapter(tmp_path / "adapter", model, targets)
    rows = make_rows(model, 7, shared=0.8, temperature=0.7)
    options = {"megatron": settings, "world_size": world, "tree_packing": tree, "micro_batch_tokens": 64}
    with start(model, tmp_path, lora=LoraSettings(lora_adapter_path=str(adapter)), **options) as trainer:
        metrics = trainer.gradients(rows, EVERYTHING, tmp_path / "gradients")
        hf, leaves = by_hand(model, adapter)
        loss = hf_loss(hf, rows, EVERYTHING)
        loss.backward()
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
        gradients = read(tmp_path / "gradients")
        assert gradients.keys() == leaves.keys()
        for name, leaf in leaves.items():
            largest = leaf.grad.abs().max()
            assert largest > 1e-4, name
            assert (gradients[name] - leaf.grad).abs().max() <= 1e-6 + (1e-5 if "moe" in family else 2e-6) * largest, (
                name
            )
        with torch.no_grad():
            assert_close(trainer.log_probs(rows), [hf_log_probs(hf, row).numpy() for row in rows])
        trainer.export_weights(tmp_path / "merged")
        merged, base = read(tmp_path / "merged"), read(model)
        assert merged.keys() == base.keys()
        for name, tensor in merged.items():
            a = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            change = leaves[a.replace("lora_A", "lora_B")] @ leaves[a] * ALPHA / RANK if a in leaves else 0
            torch.testing.assert_close(tensor, base[name] + change, rtol=0, atol=2e-6 if a in leaves else 0, msg=name)
        sums = {name: s for stage in trainer.deliver("checksums", kind="sha256") for name, s in stage.items()}
        assert sums in (server_checksums(merged.items(), ServerLayout(vocab_size=96), "sha256"), {}), (
            "what a sync sends is what is exported"
        )
        assert bool(sums) is (family in COMPARABLE)
        trainer.export_adapter(tmp_path / "again")
        again = read(tmp_path / "again")
        assert again.keys() == leaves.keys()
        assert all(torch.equal(tensor, leaves[name]) for name, tensor in again.items())
        reference = trainer.log_probs(rows, reference=True)
    if world == 1:
        with start(model, tmp_path / "whole", **options) as plain:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(reference, plain.log_probs(rows), strict=True))
    else:
        with torch.no_grad():
            assert_close(reference, [hf_log_probs(hf_model(model), row).numpy() for row in rows])


@ranks
@pytest.mark.slow
def test_steps_change_adapters_alone_and_a_resumed_run_continues_bit_exactly(tmp_path):
    """New adapters; a step as AdamW takes it; peft and the merged weights agree with the trainer; what the checkpoint holds, and refuses."""
    model = make_model(tmp_path / "model", tied=False)
    rows, lora = make_rows(model), LoraSettings(lora_rank=RANK, lora_alpha=ALPHA)
    options = {"lora": lora, "megatron": {"clip_grad": 0.05}, "micro_batch_tokens": 64}
    with start(model, tmp_path / "a", **options) as trainer:
        base = trainer.log_probs(rows)
        reference = trainer.log_probs(rows, reference=True)
        assert all((a == b).all() for a, b in zip(base, reference, strict=True)), "a new adapter changes nothing"
        trainer.export_adapter(tmp_path / "new")
        hf, leaves = by_hand(model, tmp_path / "new")
        check_new(leaves)
        metrics = trainer.step(rows, LossConfig(), 1e-2)
        hf_loss(hf, rows, LossConfig()).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.05)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert norm > 0.05
        trained = sum(t.numel() for t in leaves.values())
        assert metrics["rates"]["optimizer_mib"] * 2**20 == pytest.approx(8 * trained, abs=4 * len(leaves))
        torch.optim.AdamW(leaves.values(), lr=1e-2, weight_decay=0.01).step()
        trainer.export_adapter(tmp_path / "stepped")
        for name, tensor in read(tmp_path / "stepped").items():
            firm = leaves[name].grad.abs() > 1e-6
            torch.testing.assert_close(tensor[firm], leaves[name].detach()[firm], rtol=0, atol=2e-5, msg=name)
        trainer.step(rows, LossConfig(), 1e-2)
        again = trainer.log_probs(rows, reference=True)
        assert all((a == b).all() for a, b in zip(again, reference, strict=True)), "the base is frozen"
        now = trainer.log_probs(rows)
        assert max(np.abs(a - b).max() for a, b in zip(now, reference, strict=True)) > 0.01
        trainer.export_adapter(tmp_path / "second")
        assert_close(now, peft_log_probs(model, tmp_path / "second", rows))
        merged = trainer.export_weights(tmp_path / "merged")
        with torch.no_grad():
            assert_close(now, [hf_log_probs(hf_model(tmp_path / "merged"), row).numpy() for row in rows])
        trainer.save(tmp_path / "checkpoint")
        further = [trainer.step(rows, LossConfig(), lr)["grad_norm"] for lr in (1e-2, 5e-3)]
        final = trainer.export_weights(tmp_path / "final").fingerprint
    names = json.loads((tmp_path / "checkpoint/model.json").read_text())["lora"]
    assert names == {"rank": RANK, "alpha": ALPHA, "targets": list(ALL), "base": fingerprint(model)}
    held = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    tensors = {name for name, entry in held.items() if hasattr(entry, "size")}
    assert len(tensors) == 4 * len(leaves), "of each: the weights, the optimizer's, two moments"
    assert all(".adapter." in name for name in tensors)
    with start(model, tmp_path / "b", **{**options, "seed": 5}) as fresh:
        fresh.load(tmp_path / "checkpoint")
        assert fresh.export_weights(tmp_path / "resumed").fingerprint == merged.fingerprint
        assert [fresh.step(rows, LossConfig(), lr)["grad_norm"] for lr in (1e-2, 5e-3)] == further
        assert fresh.export_weights(tmp_path / "final-again").fingerprint == final
        check_refused(fresh, tmp_path, model)
    with (
        start(model, tmp_path / "c") as whole,
        pytest.raises(StoreError, match="holds adapters of rank 4 and no other"),
    ):
        whole.load(tmp_path / "checkpoint")


def check_new(leaves):
    """B is 0, and A is uniform within 1 / √in."""
    for name, tensor in leaves.items():
        if "lora_B" in name:
            assert not tensor.any(), name
        else:
            bound = 1 / math.sqrt(tensor.shape[1])
            assert 0.8 * bound < tensor.abs().max() <= bound, name


def check_refused(trainer, folder, model):
    """Checkpoints of other adapters, changed one value at a time."""
    file = folder / "checkpoint/model.json"
    saved = json.loads(file.read_text())
    for name, value, message in (
        ("base", "0" * 32, "holds adapters of another base: of weights with the fingerprint 000"),
        ("rank", 8, "holds adapters whose rank is 8, expected 4"),
        ("targets", ["q_proj"], r"whose targets is \['q_proj'\], expected"),
    ):
        file.write_text(json.dumps(saved | {"lora": saved["lora"] | {name: value}}))
        with pytest.raises(StoreError, match=message):
            trainer.load(folder / "checkpoint")
    file.write_text(json.dumps({k: v for k, v in saved.items() if k != "lora"}))
    with pytest.raises(StoreError, match="holds all weights of a model and no adapters"):
        trainer.load(folder / "checkpoint")
    file.write_text(json.dumps(saved))


@FULL
@ranks
@pytest.mark.parametrize(
    ("settings", "world"), [(TP2, 2), (PP2, 2), ({**TP2, **SP}, 2), ({}, 2)], ids=["TP2", "PP2", "TP2-SP", "DP2"]
)
def test_a_checkpoint_opens_at_another_parallel_size_and_converts(tmp_path, settings, world, capsys):
    """New adapters are the same in every layout, too."""
    model = make_model(tmp_path / "model")
    rows, lora = make_rows(model), LoraSettings(lora_rank=RANK, lora_alpha=ALPHA)
    with start(model, tmp_path / "a", lora=lora, megatron=settings, world_size=world) as trainer:
        trainer.export_adapter(tmp_path / "new")
        trainer.step(rows, LossConfig(), 1e-2)
        trainer.save(tmp_path / "checkpoint")
        trainer.export_adapter(tmp_path / "saved")
        trainer.step(rows, LossConfig(), 1e-2)
        trainer.export_adapter(tmp_path / "next")
    with start(model, tmp_path / "b", lora=lora) as alone:
        alone.export_adapter(tmp_path / "new-alone")
        alone.load(tmp_path / "checkpoint")
        alone.export_adapter(tmp_path / "opened")
        alone.export_weights(tmp_path / "merged")
        alone.step(rows, LossConfig(), 1e-2)
        alone.export_adapter(tmp_path / "next-alone")
    assert fingerprint(tmp_path / "new") == fingerprint(tmp_path / "new-alone")
    assert fingerprint(tmp_path / "saved") == fingerprint(tmp_path / "opened")
    one, two = read(tmp_path / "next"), read(tmp_path / "next-alone")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-4, msg=name)
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "hf"), "--model", str(model)]) == 0
    assert fingerprint(tmp_path / "hf") == fingerprint(tmp_path / "merged")
    assert fingerprint(tmp_path / "hf/adapter") == fingerprint(tmp_path / "saved")
    other = make_model(tmp_path / "other", seed=1)
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "no"), "--model", str(other)]) == 2
    assert "holds adapters of another base" in capsys.readouterr().err


@FULL
@ranks
def test_half_precision_keeps_what_it_read_and_merges_in_float32(tmp_path):
    model = make_model(tmp_path / "model")
    make_adapter(tmp_path / "adapter", model)
    rounded = {n: t.bfloat16().float() for n, t in read(tmp_path / "adapter").items()}
    save_file(rounded, tmp_path / "adapter/adapter_model.safetensors")
    lora = LoraSettings(lora_adapter_path=str(tmp_path / "adapter"))
    with start(model, tmp_path, lora=lora, dtype="bfloat16") as trainer:
        trainer.export_adapter(tmp_path / "again")
        assert fingerprint(tmp_path / "again") == fingerprint(tmp_path / "adapter")
        trainer.export_weights(tmp_path / "merged")
        merged = read(tmp_path / "merged")
        name = "model.layers.1.self_attn.k_proj"
        a, b = (rounded[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        want = (read(model)[f"{name}.weight"].bfloat16().float() + b @ a * ALPHA / RANK).bfloat16()
        assert torch.equal(merged[f"{name}.weight"], want)
        trainer.step(make_rows(model), LossConfig(), 1e-2)
        trainer.save(tmp_path / "checkpoint")
        stepped = trainer.export_weights(tmp_path / "stepped").fingerprint
        second = trainer.step(make_rows(model), LossConfig(), 1e-2)["grad_norm"]
        trainer.load(tmp_path / "checkpoint")
        assert trainer.export_weights(tmp_path / "back").fingerprint == stepped
        assert trainer.step(make_rows(model), LossConfig(), 1e-2)["grad_norm"] == second


@FULL
@ranks
def test_dropout_is_drawn_in_training_alone_and_alike_on_ranks_with_the_same_input(tmp_path):
    """Of layers whose outputs are divided, the gradients with TP of 2 are those of one rank only if the masks are the same."""
    model = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model, ("q_proj", "v_proj", "gate_proj"))
    rows = make_rows(model)
    found = {}
    for name, settings, dropout in (("one", {}, 0.5), ("two", TP2, 0.5), ("none", {}, 0.0)):
        lora = LoraSettings(lora_adapter_path=str(adapter), lora_dropout=dropout)
        world, options = len(settings) + 1, {"lora": lora, "tree_packing": False, "megatron": settings}
        with start(model, tmp_path / name, world_size=world, **options) as trainer:
            evaluated = trainer.log_probs(rows)
            trainer.gradients(rows, LossConfig(), tmp_path / f"gradients-{name}")
            found[name] = evaluated, read(tmp_path / f"gradients-{name}")
            trainer.export_adapter(tmp_path / f"exported-{name}")
    assert_close(found["one"][0], found["none"][0], 0)
    for name, gradient in found["one"][1].items():
        torch.testing.assert_close(gradient, found["two"][1][name], rtol=1e-4, atol=1e-6, msg=name)
    assert any((g - found["none"][1][n]).abs().max() > 1e-3 for n, g in found["one"][1].items())
    assert json.loads((tmp_path / "exported-one/adapter_config.json").read_text())["lora_dropout"] == 0.5


@FULL
def test_true_on_policy_mode_computes_what_the_local_engine_computes_of_the_merged_weights(tmp_path):
    model = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model)
    lora = LoraSettings(lora_adapter_path=str(adapter))
    options = {"true_on_policy": True, "tree_packing": False, "lora": lora}
    rows = make_rows(model)
    with start(model, tmp_path, **options) as trainer:
        trainer.export_weights(tmp_path / "merged")

        async def sampled():
            engine = LocalEngine(tmp_path / "merged", threads=1, single_token_chunks=True)
            await engine.start()
            try:
                return await engine.generate([5, 6, 7], SamplingParams(12, 1.0, seed=1, ignore_eos=True), session="a")
            finally:
                await engine.close()

        generation = asyncio.run(sampled())
        tokens = np.array([5, 6, 7, *generation.ids], np.int32)
        weights = np.array([0, 0, 0, *[1] * len(generation.ids)], np.float32)
        ones, zeros = np.ones_like(weights), np.zeros_like(weights)
        row = replace(rows[0], tokens=tokens, weights=weights, advantages=zeros, rollout_log_probs=zeros, temperature=ones,
                      old_log_probs=None, ref_log_probs=None)  # fmt: skip
        (got,) = trainer.log_probs([row], trained_only=True)
        assert got[3:].tolist() == list(generation.log_probs)
        trainer.gradients(rows, EVERYTHING, tmp_path / "gradients")
        hf, leaves = by_hand(model, adapter)
        hf_loss(hf, rows, EVERYTHING).backward()
        for name, gradient in read(tmp_path / "gradients").items():
            torch.testing.assert_close(gradient, leaves[name].grad, rtol=1e-3, atol=1e-5, msg=name)
        with torch.no_grad():
            want = [hf_log_probs(hf_model(model), r).numpy() for r in rows]
        assert_close(trainer.log_probs(rows, reference=True), want)


# -- what is refused before a rank starts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models, and an adapter of qwen3."""
    folder = tmp_path_factory.mktemp("lora")
    for family in ("qwen3", "glm4", "qwen3_moe", "deepseek_v3"):
        make_model(folder / family, family)
    make_model(folder / "wider", "qwen3", hidden_size=64)
    make_model(folder / "deeper", "qwen3", layers=3)
    make_model(folder / "other", "qwen3", seed=1)
    make_adapter(folder / "adapter", folder / "qwen3", MLP)
    return folder


def resolved(models, family, *, tree=False, megatron=None, **settings):
    folder = models / family
    settings = {k: str(models / v) if k == "lora_adapter_path" else v for k, v in settings.items()}
    return resolve(LoraSettings(**settings), folder, read_model_config(folder), megatron or {}, tree_packing=tree)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"lora_rank": 4, "lora_dropout": 0.1, "tree": True}, "--lora-dropout 0.1 draws a mask for each row"),
        ("qwen3_moe", {"lora_rank": 4}, r"all-linear: adapters on the experts of a mixture \(gate_proj\) are not supported"),
        ("qwen3_moe", {"lora_rank": 4, "lora_target_modules": ("down_proj",)}, "experts of a mixture .down_proj."),
        ("glm4", {"lora_rank": 4}, "'glm4' has no separate gate_proj to adapt; it has q_proj k_proj v_proj o_proj down_proj"),
        ("deepseek_v3", {"lora_rank": 4}, "adapters on latent attention .* are not supported"),
        ("qwen3", {"lora_rank": 4, "megatron": {"moe_router_bias_update_rate": 1e-3}}, "changes the base"),
        ("qwen3", {"lora_adapter_path": "qwen3"}, "is not a folder of peft: it has no file adapter_config.json"),
        ("qwen3", {"lora_adapter_path": "adapter", "lora_rank": 8}, "--lora-rank 8 contradicts .* have 4"),
        ("qwen3", {"lora_adapter_path": "adapter", "lora_alpha": 8.0}, "--lora-alpha 8 contradicts .* have 6"),
        ("qwen3", {"lora_adapter_path": "adapter", "lora_target_modules": ("q_proj",)}, "contradicts .* adapts gate_proj up_proj down_proj"),
        ("wider", {"lora_adapter_path": "adapter"}, r"of another base than .*down_proj.lora_B.weight' has shape \[32, 4\], expected \[64, 4\]"),
        ("deeper", {"lora_adapter_path": "adapter"}, "another base than .* the tensor .*layers.2.mlp.down_proj.lora_A.weight' is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_named(models, family, settings, message):
    with pytest.raises((ConfigError, DataError), match=message):
        resolved(models, family, **settings)


def test_a_command_without_a_trainer_refuses_adapters(tmp_path, capsys):
    assert main(["rollout", "--env", "search_r1", "--lora-rank", "4"]) == 2
    assert "--lora-rank has no effect in `agentrl rollout`, which trains nothing" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text('[lora]\nlora_adapter_path = "adapter"\n')
    words = ["--env", "search_r1", "--config", str(tmp_path / "config.toml"), "--run", str(tmp_path / "run")]
    assert main(["eval", *words]) == 2
    assert "adapters are merged into weights by a trainer, and this command has none" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["players", "eval_players"])
def test_a_player_with_the_weights_of_the_start_is_refused_where_these_are_adapters(models, name):
    adapter = {"lora_adapter_path": str(models / "adapter")}
    with pytest.raises(ConfigError, match="--player initial is the base, without the adapters"):
        trained_adapters(build_config(adapter | {name: {"first": "initial"}}), models / "qwen3")
    assert trained_adapters(build_config(adapter | {name: {"first": "policy"}}), models / "qwen3").targets == MLP


def test_what_an_adapter_is(models, tmp_path):
    new = resolved(models, "qwen3", lora_rank=4, lora_target_modules=("o_proj", "q_proj"))
    assert (new.rank, new.alpha, new.targets, new.start) == (4, 8.0, ("q_proj", "o_proj"), None)
    assert new.base == fingerprint(models / "qwen3")
    line = describe(models / "qwen3", read_model_config(models / "qwen3"), new)
    trained = 2 * 2 * 4 * (32 + 64)
    assert f"on q_proj o_proj: {trained:,} parameters are trained" in line
    read_ = resolved(models, "qwen3", lora_adapter_path="adapter", lora_rank=4)
    assert (read_.rank, read_.alpha, read_.targets, read_.start) == (4, 6, MLP, models / "adapter")
    assert resolved(models, "deepseek_v3") is None


def changed(models, folder, *, metadata=None, drop=None, **config):
    """A copy of the adapter with other values."""
    folder.mkdir(exist_ok=True)
    values = json.loads((models / "adapter/adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    save_file(read(models / "adapter"), folder / "adapter_model.safetensors", metadata)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True; adapters with it cannot be trained"),
        ({"bias": "all"}, "bias is 'all'; adapters with it"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"r": 0}, "r is 0; expected a number of at least 1"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_an_adapter_of_another_kind_is_named(models, tmp_path, config, message):
    with pytest.raises((ConfigError, DataError), match=message):
        resolved(models, "qwen3", lora_adapter_path=changed(models, tmp_path / "a", **config))


def test_an_adapter_of_other_weights_of_the_same_shape_is_refused(models, tmp_path, caplog):
    own = changed(models, tmp_path / "own", metadata={"base_weights": fingerprint(models / "qwen3")})
    assert resolved(models, "qwen3", lora_adapter_path=own).start == Path(own)
    assert not caplog.records
    with pytest.raises(
        DataError,
        match=f"holds adapters of another base: of weights with the fingerprint {fingerprint(models / 'qwen3')}",
    ):
        resolved(models, "other", lora_adapter_path=own)
    resolved(models, "other", lora_adapter_path=changed(models, tmp_path / "unknown"))
    assert "does not say which weights it adapts" in caplog.text
    broken = tmp_path / "own/adapter_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        resolved(models, "qwen3", lora_adapter_path=own)
    with safe_open(tmp_path / "unknown/adapter_model.safetensors", "pt") as handle:
        assert handle.metadata() is None
