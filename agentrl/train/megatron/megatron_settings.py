"""Megatron's settings, checked against the model and this machine before anything starts. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError, suggest
from agentrl.train.megatron.megatron_flags import DECIDED_BY_TRAINER, FlagSpec, megatron_flags
from agentrl.train.megatron.model_config import ModelConfig, read_model_config

Settings = Mapping[str, Any]
"""Values by the field names of megatron's dataclasses."""
_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)


def check_trainer(folder: Path, settings: Settings, requested_ranks: int | None, gpus: int) -> None:
    """Check everything that can be known before a rank starts. `gpus`: GPUs of this machine; 0: the ranks run on its CPU.

    Raises:
        UsageError: the trainer cannot start.
    """
    check_settings(settings, read_model_config(folder), cpu=not gpus)
    ranks, _ = rank_counts(settings, requested_ranks)
    if 0 < gpus < ranks:
        raise ConfigError(f"the trainer needs {ranks} GPUs, one for each rank; this machine has {gpus}")
    weight_files(folder)


def rank_counts(settings: Settings, requested: int | None) -> tuple[int, int]:
    """(number of ranks, ranks of one data-parallel copy). `requested`: number of ranks; None: one copy.

    Raises:
        ConfigError: the ranks do not divide into whole copies.
    """
    copy = settings.get("tensor_model_parallel_size", 1) * settings.get("pipeline_model_parallel_size", 1)
    ranks = requested or copy
    if ranks % copy:
        raise ConfigError(
            f"--actor-num-gpus-per-node: {ranks} ranks are not a multiple of tensor × pipeline model parallel size = {copy}"
        )
    return ranks, copy


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        DataError: there are none, or a file named by the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    for name in names:
        if not (folder / name).exists():
            raise DataError(f"{folder} has no file {name}, which {index.name} names")
    files = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"{folder} holds no *.safetensors files; save the model with save_pretrained(…, safe_serialization=True)"
        )
    return files


def required_settings(model: ModelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that follow from the model and the trainer."""
    return {
        **model.transformer,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def check_settings(settings: Settings, model: ModelConfig, *, cpu: bool) -> None:
    """Refuse settings that cannot work.

    Raises:
        ConfigError: unknown name, wrong type, or a contradiction.
    """
    _check_names(settings)
    for name, value in required_settings(model).items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"{name} = {settings[name]!r} contradicts the model or the trainer, which need {value!r}; leave it out"
            )
    _check_parallel(settings, model)
    if settings.get("expert_model_parallel_size", 1) > 1 or settings.get("num_moe_experts"):
        raise ConfigError("mixtures of experts are not supported: the model is dense")
    if settings.get("use_megatron_fsdp") or settings.get("use_custom_fsdp"):
        raise ConfigError(
            "use_megatron_fsdp is not supported; the optimizer is distributed already (use_distributed_optimizer)"
        )
    if cpu and (settings.get("fp8") or settings.get("fp4")):
        raise ConfigError("fp8 and fp4 need a GPU and Transformer Engine")


def _check_names(settings: Settings) -> None:
    specs = {spec.field: spec for spec in megatron_flags().values()}
    for name, value in settings.items():
        if name in DECIDED_BY_TRAINER:
            raise ConfigError(f"[megatron] {name} cannot be set: {DECIDED_BY_TRAINER[name]}")
        if name not in specs:
            raise ConfigError(f"[megatron]: megatron-core has no setting {name!r}{suggest(name, specs)}")
        _check_type(specs[name], value)


def _check_type(spec: FlagSpec, value: Any) -> None:
    values = value if spec.many and isinstance(value, list) else [value]
    allowed = {float: (float, int), str: (str, int, float), int: (int,), bool: (bool,)}[spec.type]
    if any(not isinstance(v, allowed) or (isinstance(v, bool) and spec.type in (int, float)) for v in values):
        raise ConfigError(f"[megatron] {spec.field} takes a value of type {spec.type.__name__}; found {value!r}")


def _check_parallel(settings: Settings, model: ModelConfig) -> None:
    tensor, pipeline = (settings.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    if min(tensor, pipeline) < 1:
        raise ConfigError(f"tensor and pipeline model parallel sizes must be at least 1, found {tensor} and {pipeline}")
    shape = model.transformer
    for name, count in (
        ("key-value heads", shape["num_query_groups"]),
        ("feed-forward channels (intermediate_size)", shape["ffn_hidden_size"]),
    ):
        if count % tensor:
            raise ConfigError(f"tensor_model_parallel_size {tensor} does not divide the model's {count} {name}")
    layers = shape["num_layers"]
    if layers % pipeline and not any(settings.get(name) for name in _UNEVEN_STAGES):
        raise ConfigError(f"pipeline_model_parallel_size {pipeline} does not divide the model's {layers} layers")
    if settings.get("context_parallel_size", 1) > 1:
        raise ConfigError(
            "context_parallel_size > 1 is not supported: rows are padded, not packed; use tensor and sequence parallelism"
        )
    if settings.get("virtual_pipeline_model_parallel_size"):
        raise ConfigError(
            "virtual_pipeline_model_parallel_size is not supported: interleaved pipelines compute wrong numbers over gloo"
        )
    if settings.get("sequence_parallel") and tensor == 1:
        raise ConfigError("sequence_parallel needs tensor_model_parallel_size > 1")
