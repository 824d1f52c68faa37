"""A model's shape, read from its Hugging Face `config.json`: what megatron-core is to build. No torch, no transformers.

What cannot be built exactly is refused by name, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

FAMILIES = {
    # model_type: (biases on q, k, v; norms on q and k)
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    llama3: Mapping[str, float] | None
    """factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; None: no scaling"""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder."""

    family: str
    transformer: Mapping[str, Any]
    """fields of megatron's TransformerConfig"""
    vocab_size: int
    max_positions: int
    tied: bool
    rope: Rope

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return int(self.transformer["kv_channels"])


def read_shape(folder: Path) -> ModelShape:
    """Read `folder/config.json`.

    Raises:
        ConfigError: no such file, a family we do not know, or a feature that megatron-core's dense GPT lacks.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    hf = json.loads(path.read_text())
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} cannot be trained; known: {', '.join(FAMILIES)}")
    _refuse(path, hf)
    needed = (
        "num_attention_heads hidden_size num_hidden_layers intermediate_size rms_norm_eps vocab_size "
        "max_position_embeddings"
    ).split()
    if missing := [name for name in needed if name not in hf]:
        raise ConfigError(f"{path} does not say {missing[0]}, without which the model cannot be trained")
    qkv_bias, qk_norm = FAMILIES[family]
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    transformer = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hidden // heads,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
    }
    return ModelShape(
        family,
        transformer,
        hf["vocab_size"],
        hf["max_position_embeddings"],
        bool(hf.get("tie_word_embeddings")),
        _rope(path, hf),
    )


def _refuse(path: Path, hf: Mapping[str, Any]) -> None:
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    }
    for key, value in wanted.items():
        if hf.get(key, value) != value:
            raise ConfigError(f"{path}: {key} is {hf[key]!r}; only {value!r} can be trained")
    if "sliding_attention" in (hf.get("layer_types") or ()):
        raise ConfigError(f"{path}: layer_types has sliding_attention; only full_attention can be trained")


def _rope(path: Path, hf: Mapping[str, Any]) -> Rope:
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters."""
    given = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = given.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rope(float(theta), None)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Rope(float(theta), {n: float(given[n]) for n in names})
    raise ConfigError(f"{path}: rope type {kind!r} cannot be trained; known: default, llama3")
