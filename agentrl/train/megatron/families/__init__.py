"""The model families that the trainer can build: for each a file that reads its config.json and names its tensors. No torch, no transformers.

A family is a module with `read(config)`, which returns the model that a config.json describes, and `layer(model, number)`, the tensors of
one of its layers (see base.py). A model that cannot be built exactly is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from agentrl.errors import ConfigError, DataError
from agentrl.train.megatron.families import (
    deepseek_v3,
    glm4,
    glm4_moe,
    llama,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_moe,
)
from agentrl.train.megatron.families.base import HuggingFaceConfig, ModelConfig, Tensors

FAMILIES: Mapping[str, ModuleType] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
}
"""By model_type"""
_LINEAR_ATTENTION = (
    "its linear attention carries a state from token to token, which token trees cannot branch, and megatron-core computes it "
    "only with kernels for GPUs"
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"),
        "its first layers add features of images to their outputs (DeepStack), which the trainer's layers do not; Qwen2-VL and Qwen2.5-VL can",
    ),
    "gpt_oss": "its attention has sinks and sliding windows, which token trees do not support",
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), _LINEAR_ATTENTION),
}
"""Families that are known and cannot be trained, and why"""
EMBEDDING = "model.embed_tokens.weight"
VALUE_HEAD, VALUE_BIAS = "score.weight", "score.bias"
"""the value head of a critic, as transformers' ForTokenClassification names it"""
_TOP: Tensors = {
    "embedding.word_embeddings.weight": ("vocab", EMBEDDING),
    "output_layer.weight": ("vocab", "lm_head.weight"),
    "decoder.final_layernorm.weight": ("copy", "model.norm.weight"),
}
_DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names of tensors that follow from config.json, which some folders hold."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one megatron parameter is made of Hugging Face tensors."""

    kind: str
    """see families/base.py"""
    names: tuple[str, ...]
    """Hugging Face names of the tensors"""


def read_family(config: HuggingFaceConfig) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
        ConfigError: its family or a feature is not supported.
    """
    name = config.get("model_type")
    if name in REFUSED:
        raise ConfigError(f"{config.path}: model_type {name!r} cannot be trained: {REFUSED[name]}")
    if name not in FAMILIES:
        raise ConfigError(f"{config.path}: model_type {name!r} cannot be trained; supported: {', '.join(FAMILIES)}")
    model: ModelConfig = FAMILIES[name].read(config)
    return replace(model, family=name)


def conversions(model: ModelConfig, *, critic: bool = False) -> dict[str, Conversion]:
    """The conversion of every megatron parameter, with layers numbered over the whole model."""
    table = {name: Conversion(kind, tuple(names)) for name, (kind, *names) in _TOP.items()}
    if critic:
        table["output_layer.weight"] = Conversion("value_head", (VALUE_HEAD,))
    elif model.tied:
        table["output_layer.weight"] = Conversion("vocab", (EMBEDDING,))
    for number in range(model.transformer["num_layers"]):
        for name, (kind, *names) in FAMILIES[model.family].layer(model, number).items():
            source = tuple(f"model.layers.{number}.{x}" for x in names)
            table[f"decoder.layers.{number}.{name}"] = Conversion(kind, source)
    return table


def check_names(folder: Path, model: ModelConfig, names: Iterable[str], *, critic: bool = False) -> list[str]:
    """Compare the tensors of a folder with those of the model, before any is read. Returns those that are left out on purpose.

    Raises:
        DataError: a tensor is missing, or has no counterpart in the model.
    """
    required = {name for c in conversions(model).values() for name in c.names}
    present = set(names)
    if critic:
        required -= {"lm_head.weight"}
    if missing := sorted(required - present):
        raise DataError(f"{folder} has no tensor {missing[0]!r}, which its config.json requires{_more(missing)}")
    if model.vision is not None:
        carried = {name for name in present if name.startswith(model.vision.prefix)}
        if not carried:
            raise DataError(
                f"{folder} has no tensors {model.vision.prefix}…, the vision tower that its config.json requires"
            )
        present -= carried
    left_out, unknown = [], []
    first = model.transformer["num_layers"]
    prediction = tuple(f"model.layers.{first + i}." for i in range(model.untrained_layers))
    for name in sorted(present - required):
        if name.startswith(prediction):
            left_out.append(name)
        elif not (name in ("lm_head.weight", VALUE_HEAD, VALUE_BIAS) or name.endswith(_DERIVED)):
            unknown.append(name)
    if unknown:
        raise DataError(
            f"{folder}: the tensor {unknown[0]!r} has no counterpart in megatron-core for model_type {model.family!r}{_more(unknown)}; "
            "nothing was converted"
        )
    return left_out


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
