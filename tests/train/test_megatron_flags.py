"""Megatron's flags are the fields of its dataclasses, read from its source without importing torch."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from agentrl.errors import ConfigError
from agentrl.train.megatron.megatron_flags import ALIASES, DECIDED_BY_TRAINER, megatron_flags, why_not_settable
from agentrl.train.megatron.megatron_settings import check_trainer


def test_no_torch_is_imported():
    code = "import sys; from agentrl.train.megatron.megatron_flags import megatron_flags; megatron_flags(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_flag_is_a_field_with_its_default():
    from dataclasses import MISSING, fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {
        c.__name__: {f.name: f for f in fields(c)}
        for c in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    }
    specs = megatron_flags()
    for spec in specs.values():
        for owner in spec.owners:
            assert spec.field in classes[owner], spec
        default = classes[spec.owners[0]][spec.field].default
        if isinstance(default, (int, float, str, bool)) and spec.default is not None:
            assert spec.default == default, spec.name
    assert {owner for s in specs.values() for owner in s.owners} == set(classes)
    missing = {
        n for c in classes.values() for n, f in c.items() if f.type in (int, float, bool) and f.default is not MISSING
    } - {s.field for s in specs.values()}
    assert missing <= set(DECIDED_BY_TRAINER), missing


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("tensor-model-parallel-size 2", "tensor_model_parallel_size", 2),
        ("sequence-parallel", "sequence_parallel", True),
        ("recompute-activations", "recompute_granularity", "selective"),
        ("weight-decay 0.1", "weight_decay", 0.1),
        ("adam-beta1 0.8", "adam_beta1", 0.8),
        ("clip-grad 0.5", "clip_grad", 0.5),
        ("no-overlap-grad-reduce", "overlap_grad_reduce", False),
        ("no-bias-swiglu-fusion", "bias_activation_fusion", False),
        ("recompute-modules core_attn mlp", "recompute_modules", ["core_attn", "mlp"]),
    ],
)
def test_values(words, field, value):
    name, *rest = words.split()
    assert megatron_flags()[name].parse(rest) == (field, value)


@pytest.mark.parametrize(
    "words", ["clip-grad", "clip-grad x", "clip-grad 1 2", "sequence-parallel 1", "recompute-granularity half"]
)
def test_wrong_values_are_refused(words):
    name, *rest = words.split()
    with pytest.raises(ConfigError, match=f"--{name}"):
        megatron_flags()[name].parse(rest)


def test_every_field_of_megatron_is_a_flag_or_is_refused_with_the_reason():
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    settable = {spec.field for spec in megatron_flags().values()}
    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    names = {f.name for c in classes for f in fields(c) if not f.name.startswith("_")}
    assert len(names) > 300
    for name in names:
        assert (name in settable) is (why_not_settable(name) is None), name
    assert set(DECIDED_BY_TRAINER) <= names
    assert why_not_settable("no-bf16") == why_not_settable("bf16") == "it follows from --dtype"
    assert why_not_settable("no_such_field") is None


MODEL = Path(__file__).parents[2] / "agentrl/assets/search_r1_3m"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "nonsense"), ("optimizer", "sgd"), ("multi_latent_attention", True), ("moe_router_topk", 4),
        ("moe_grouped_gemm", True), ("mtp_num_layers", 1), ("softmax_scale", 0.1), ("window_size", 128), ("qk_clip", True),
        ("hidden_dropout", 0.1), ("linear_attention_freq", 4), ("context_parallel_size", 0),
        ("attention_dropout", 0.1), ("muon_momentum", 0.5), ("sgd_momentum", 0.5), ("decoupled_lr", 0.1), ("loss_scale", 2.0),
        ("bf16", True), ("attention_backend", "flash"), ("pipeline_model_parallel_layout", "E|t|L"), ("grad_sync_func", "f"),
        ("virtual_pipeline_model_parallel_size", 2),
    ],
)  # fmt: skip
def test_the_pre_check_refuses_what_cannot_be_trained_or_has_no_effect(name, value):
    with pytest.raises(ConfigError, match=name) as e:
        check_trainer(MODEL, {name: value}, None, 0)
    assert "\n" not in str(e.value)


def test_the_pre_check_takes_what_can_be_trained():
    check_trainer(MODEL, {"optimizer": "adam", "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-6}, None, 0)
    check_trainer(MODEL, {"hidden_dropout": 0.1}, None, 0, tree_packing=False)
    check_trainer(MODEL, {"context_parallel_size": 2}, 4, 0)
    check_trainer(MODEL, {"attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_softmax_in_fp32": True}, None, 0)
    defaults = {s.field: s.default for s in megatron_flags().values() if s.field.startswith(("moe_", "sgd_", "muon_"))}
    check_trainer(MODEL, {name: value for name, value in defaults.items() if value is not None}, None, 0)


def test_aliases_point_at_fields():
    fields = {s.field for s in megatron_flags().values()}
    assert {field for field, _ in ALIASES.values()} <= fields
