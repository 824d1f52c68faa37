"""Megatron's settings, checked against a model's shape and this machine before anything starts. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError, suggest
from agentrl.train.megatron.megatron_flags import DECIDED_BY_TRAINER, FlagSpec, megatron_flags
from agentrl.train.megatron.model_config import ModelShape, read_shape

Settings = Mapping[str, Any]
"""by the field names of megatron's dataclasses"""


def check_trainer(folder: Path, settings: Settings, asked: int | None, cards: int) -> None:
    """Everything that can be known to fail before a rank is started; `cards`: the machine's GPUs (0: the ranks run on its CPU).

    Raises:
        UsageError: one sentence.
    """
    shape = read_shape(folder)
    check_settings(settings, shape, cpu=not cards)
    ranks, _ = world(settings, asked)
    if 0 < cards < ranks:
        raise ConfigError(f"the trainer needs {ranks} GPUs, one for each rank; this machine has {cards}")
    weight_files(folder)


def world(settings: Settings, asked: int | None) -> tuple[int, int]:
    """(ranks, ranks of one data-parallel copy).

    Raises:
        ConfigError: the one is no multiple of the other.
    """
    copy = settings.get("tensor_model_parallel_size", 1) * settings.get("pipeline_model_parallel_size", 1)
    ranks = asked or copy
    if ranks % copy:
        raise ConfigError(
            f"--actor-num-gpus-per-node: {ranks} ranks are not a multiple of tensor × pipeline model parallel size = {copy}"
        )
    return ranks, copy


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        DataError: there is none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    named = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    missing = [name for name in named if not (folder / name).exists()]
    if missing:
        raise DataError(f"{folder} has no file {missing[0]}, which {index.name} names")
    files = [folder / name for name in named] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"{folder} holds no *.safetensors files; save the model with save_pretrained(…, safe_serialization=True)"
        )
    return files


def insisted(shape: ModelShape) -> dict[str, Any]:
    """Fields of TransformerConfig that follow from the model and from what the trainer is."""
    return {
        **shape.transformer,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def check_settings(settings: Settings, shape: ModelShape, *, cpu: bool) -> None:
    """Refuse what cannot work, in words.

    Raises:
        ConfigError: a name that megatron-core does not have, a value of the wrong type, or a contradiction.
    """
    _check_names(settings)
    for name, value in insisted(shape).items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"{name} = {settings[name]!r} contradicts the model or the trainer, which need {value!r}; leave it out"
            )
    _check_parallel(settings, shape)
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
            raise ConfigError(f"[megatron] {name} cannot be set; what decides it: {DECIDED_BY_TRAINER[name]}")
        if name not in specs:
            raise ConfigError(f"[megatron]: megatron-core has no setting {name!r}{suggest(name, specs)}")
        _check_type(specs[name], value)


def _check_type(spec: FlagSpec, value: Any) -> None:
    values = value if spec.many and isinstance(value, list) else [value]
    allowed = {float: (float, int), str: (str, int, float), int: (int,), bool: (bool,)}[spec.type]
    if any(not isinstance(v, allowed) or (isinstance(v, bool) and spec.type in (int, float)) for v in values):
        raise ConfigError(f"[megatron] {spec.field} takes a value of type {spec.type.__name__}; found {value!r}")


def _check_parallel(settings: Settings, shape: ModelShape) -> None:
    tp, pp = (settings.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    if min(tp, pp) < 1:
        raise ConfigError(f"tensor and pipeline model parallel sizes must be at least 1, found {tp} and {pp}")
    model = shape.transformer
    for what, count in (
        ("key-value heads", model["num_query_groups"]),
        ("feed-forward channels (intermediate_size)", model["ffn_hidden_size"]),
    ):
        if count % tp:
            raise ConfigError(f"tensor_model_parallel_size {tp} does not divide the model's {count} {what}")
    uneven = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    if model["num_layers"] % pp and not any(settings.get(name) for name in uneven):
        raise ConfigError(f"pipeline_model_parallel_size {pp} does not divide the model's {model['num_layers']} layers")
    if settings.get("context_parallel_size", 1) > 1:
        raise ConfigError(
            "context_parallel_size > 1 is not supported: rows are padded, not packed; use tensor and sequence parallelism"
        )
    if settings.get("virtual_pipeline_model_parallel_size"):
        raise ConfigError(
            "virtual_pipeline_model_parallel_size is not supported: interleaved pipelines compute wrong numbers over gloo"
        )
    if settings.get("sequence_parallel") and tp == 1:
        raise ConfigError("sequence_parallel needs tensor_model_parallel_size > 1")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank must know to start."""

    model: Path
    """Hugging Face folder"""
    megatron: Mapping[str, Any]
    """settings by megatron's field names"""
    dtype: str
    """float32 or bfloat16"""
    reference: bool
    """keep a frozen copy"""
    seed: int
    threads: int
    """of this process"""
    rank: int
    world: int
    local_rank: int
    """which GPU of this machine"""
    port: int
    timeout_s: float
    """of collectives"""
