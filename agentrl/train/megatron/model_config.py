"""The configuration of a model, read from its Hugging Face config.json: what megatron-core must build. No torch, no transformers.

A model that cannot be built exactly is refused, never approximated.
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
_REQUIRED = (
    "num_attention_heads",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    llama3: Mapping[str, float] | None = None
    """factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; None: no scaling"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder."""

    transformer: Mapping[str, Any]
    """fields of megatron's TransformerConfig"""
    vocab_size: int
    max_positions: int
    tied: bool
    """the output layer and the embedding share one weight"""
    rope: Rope

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return int(self.transformer["kv_channels"])


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises:
        ConfigError: there is no such file, or the model's family or a feature is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config = json.loads(path.read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} cannot be trained; supported: {', '.join(FAMILIES)}")
    for key, value in _ONLY.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{path}: {key} is {config[key]!r}; only {value!r} can be trained")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError(f"{path}: layer_types has sliding_attention; only full_attention can be trained")
    for key in _REQUIRED:
        if key not in config:
            raise ConfigError(f"{path} has no key {key}, without which the model cannot be trained")
    qkv_bias, qk_norm = FAMILIES[family]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelConfig(
        transformer={
            "num_layers": config["num_hidden_layers"],
            "hidden_size": hidden,
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim") or hidden // heads,
            "layernorm_epsilon": config["rms_norm_eps"],
            "add_qkv_bias": qkv_bias,
            "qk_layernorm": qk_norm,
        },
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings")),
        rope=_rope(path, config),
    )


def _rope(path: Path, config: Mapping[str, Any]) -> Rope:
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(theta, {name: float(rope[name]) for name in _LLAMA3_ROPE})
    raise ConfigError(f"{path}: rope type {kind!r} cannot be trained; supported: default, llama3")
