"""What the families share: the facts of a model, the tables of tensor names, and the reading of config.json. No torch, no transformers.

A table defines for each megatron parameter of a layer the Hugging Face tensors it consists of, and how they are divided over the ranks:

    copy            one tensor, equal on all tensor-parallel ranks
    rows            one tensor, divided along dimension 0
    columns         one tensor, divided along dimension 1
    glu             gate and up, each divided along dimension 0, joined on each rank
    glu_joined      gate and up in one tensor, divided as `glu`
    vocab           one tensor, padded with zeros to a multiple of the ranks, divided along dimension 0
    qkv             q, k and v, joined per key-value head (its query heads, then k, then v), divided by key-value heads
    value_head      the head of a critic, equal on all ranks
    expert_rows     one tensor for each expert, stacked; the experts are divided over the expert-parallel ranks, each as `rows`
    expert_columns  the same, each as `columns`
    router_bias     as `copy`, in fp32 whatever the precision of the model, and not trained
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.routed_experts import RouterShape
from agentrl.errors import ConfigError

Tensors = Mapping[str, tuple[str, ...]]
"""megatron parameter -> kind, and the names of its Hugging Face tensors; both without what stands before a layer's parts"""

_ATTENTION, _MLP = "self_attn.", "mlp."
QKV: Tensors = {
    "self_attention.linear_qkv.weight": ("qkv", *(_ATTENTION + f"{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_proj.weight": ("columns", _ATTENTION + "o_proj.weight"),
}
QKV_BIAS: Tensors = {"self_attention.linear_qkv.bias": ("qkv", *(_ATTENTION + f"{x}_proj.bias" for x in "qkv"))}
QK_NORM: Tensors = {
    "self_attention.q_layernorm.weight": ("copy", _ATTENTION + "q_norm.weight"),
    "self_attention.k_layernorm.weight": ("copy", _ATTENTION + "k_norm.weight"),
}
NORMS: Tensors = {
    "input_layernorm.weight": ("copy", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("copy", "post_attention_layernorm.weight"),
}
MLP: Tensors = {
    "mlp.linear_fc1.weight": ("glu", _MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "mlp.linear_fc2.weight": ("columns", _MLP + "down_proj.weight"),
}
FUSED_NORMS: Tensors = {
    "self_attention.linear_qkv.layer_norm_weight": ("copy", "input_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": ("copy", "post_attention_layernorm.weight"),
}
"""Transformer Engine fuses each norm into the linear layer that follows it"""
ROUTER: Tensors = {"mlp.router.weight": ("copy", "mlp.gate.weight")}
ROUTER_BIAS: Tensors = {"mlp.router.expert_bias": ("router_bias", "mlp.gate.e_score_correction_bias")}
SHARED_EXPERT: Tensors = {
    "mlp.shared_experts.linear_fc1.weight": (
        "glu",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("columns", "mlp.shared_experts.down_proj.weight"),
}
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN_ROPE = ("factor", "original_max_position_embeddings")
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}


def experts(count: int) -> Tensors:
    """The tensors of `count` experts, each with separate gate, up and down matrices."""
    kinds = {"gate": "expert_rows", "up": "expert_rows", "down": "expert_columns"}
    return {
        f"mlp.experts.{part}": (kind, *(f"mlp.experts.{i}.{part}_proj.weight" for i in range(count)))
        for part, kind in kinds.items()
    }


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    llama3: Mapping[str, float] | None = None
    """factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; None: no such scaling"""
    channels: int | None = None
    """the first channels of a head, which are rotated; None: all"""
    sections: tuple[int, ...] | None = None
    """pairs of channels that rotate by the time, height and width of a token's position (M-RoPE); None: a position is one number"""
    yarn: Mapping[str, float] | None = None
    """factor, original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim (0: not given); None: no such scaling"""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    query_rank: int | None
    """of the compressed queries; None: they are not compressed"""
    key_value_rank: int
    content_channels: int
    """of a head, without positions"""
    rotary_channels: int
    """of a head, with positions; those of the keys are one vector for all heads"""
    value_channels: int
    interleaved: bool
    """the channels of a pair are neighbours; otherwise the two halves"""


@dataclass(frozen=True, slots=True)
class Vision:
    """What the text tower needs to know of a vision tower, which is transformers' (vision_tower.py) and is not trained."""

    image_token: int
    """id of the token that stands for a part of an image"""
    video_token: int
    prefix: str
    """of the names of the vision tower's tensors"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder."""

    transformer: Mapping[str, Any]
    """fields of megatron's TransformerConfig"""
    vocab_size: int
    max_positions: int
    tied: bool
    """the output layer and the embedding share one weight"""
    rope: Rope
    family: str = ""
    """model_type in config.json"""
    post_norms: bool = False
    """the outputs of attention and MLP are normalised before they are added"""
    latent: LatentAttention | None = None
    vision: Vision | None = None
    """None: a text model"""
    untrained_layers: int = 0
    """layers for multi-token prediction after the last one, which are neither trained nor exported"""

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return int(self.transformer["kv_channels"])

    @property
    def experts(self) -> int:
        """Experts of a layer; 0: a dense model."""
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def router(self) -> RouterShape | None:
        """What the routers choose from; None: a dense model."""
        if not self.experts:
            return None
        layers = int(self.transformer["num_layers"])
        return RouterShape(
            layers=layers,
            experts=self.experts,
            topk=int(self.transformer["moe_router_topk"]),
            mixtures=tuple(filter(self.has_experts, range(layers))),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer (from 0) is a mixture of experts."""
        return bool(self.experts and self.transformer["moe_layer_freq"][layer])


class HuggingFaceConfig:
    """A config.json."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise ConfigError(f"{self.path} has no key {key}, without which the model cannot be trained")
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key that may be absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def first(self, *keys: str) -> Any:
        """The value of the first key that is there: transformers has renamed some."""
        return next((self._values[key] for key in keys if key in self._values), None) or self[keys[0]]

    def only(self, **values: Any) -> None:
        """Refuse a key with another value than this one, which is that of an absent key.

        Raises:
            ConfigError: a key has another value.
        """
        for key, value in values.items():
            if self._values.get(key, value) != value:
                raise ConfigError(f"{self.path}: {key} is {self._values[key]!r}; only {value!r} can be trained")

    def text(self) -> HuggingFaceConfig:
        """The text tower of a model of images: `text_config`, or in older files keys beside those of the whole model."""
        whole = {key: value for key, value in self._values.items() if key not in ("text_config", "vision_config")}
        tied = {key: whole[key] for key in ("tie_word_embeddings",) if key in whole}
        return HuggingFaceConfig(self.path, {**whole, **self.get("text_config", {}), **tied})

    def rope(self, *, channels: int | None = None, yarn: bool = False, sections: Sequence[int] = ()) -> Rope:
        """transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters. `yarn`: the family supports YaRN; `sections`: it has
        M-RoPE, with these sections if the file has none.
        """
        rope = {**self.get("rope_scaling", {}), **self.get("rope_parameters", {})}
        theta = float(rope.get("rope_theta", self._values.get("rope_theta", 1e6 if sections else 10000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if sections and kind in ("default", "mrope"):
            return Rope(theta, channels=channels, sections=tuple(rope.get("mrope_section", sections)))
        if kind == "default":
            return Rope(theta, channels=channels)
        if kind == "llama3":
            return Rope(theta, {name: float(rope[name]) for name in _LLAMA3_ROPE}, channels=channels)
        if kind == "yarn" and yarn:
            values = {name: float(rope[name]) for name in _YARN_ROPE}
            values |= {name: float(rope.get(name) or default) for name, default in _YARN_DEFAULTS.items()}
            return Rope(theta, channels=channels, yarn=values)
        supported = "default, llama3, yarn" if yarn else "default, llama3"
        raise ConfigError(f"{self.path}: rope type {kind!r} cannot be trained; supported: {supported}")


def decoder(config: HuggingFaceConfig, *, rope: Rope | None = None, **transformer: Any) -> ModelConfig:
    """What all families have in common. `transformer`: further fields of megatron's TransformerConfig.

    Raises:
        ConfigError: a key is missing, or has a value that cannot be trained.
    """
    config.only(hidden_act="silu", mlp_bias=False, use_sliding_window=False, attention_dropout=0.0)
    if "sliding_attention" in config.get("layer_types", ()):
        raise ConfigError(f"{config.path}: layer_types has sliding_attention; only full_attention can be trained")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelConfig(
        transformer={
            "num_layers": config["num_hidden_layers"],
            "hidden_size": hidden,
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads", heads),
            "kv_channels": config.get("head_dim", hidden // heads),
            "layernorm_epsilon": config["rms_norm_eps"],
            "add_qkv_bias": False,
            "qk_layernorm": False,
            **transformer,
        },
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings")),
        rope=rope or config.rope(),
    )


def softmax_experts(config: HuggingFaceConfig) -> dict[str, Any]:
    """TransformerConfig's fields of a router with the softmax over all experts, or over the chosen ones (`norm_topk_prob`)."""
    return {
        "num_moe_experts": config.first("num_experts", "num_local_experts"),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
    }


def sigmoid_experts(config: HuggingFaceConfig) -> dict[str, Any]:
    """TransformerConfig's fields of a router with independent scores and a correction bias (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2).

    Raises:
        ConfigError: scores that are not normalised, or groups that are not scored by their two best experts.
    """
    config.only(norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    count, topk = config.first("n_routed_experts", "num_local_experts"), config["num_experts_per_tok"]
    groups, chosen = config.get("n_group", 1), config.get("topk_group", 1)
    limited = chosen < groups
    if limited and topk // chosen != 2:
        raise ConfigError(
            f"{config.path}: {topk} experts of {chosen} groups; a group is scored by its two best experts, which megatron-core computes "
            "only with two experts for each group"
        )
    if topk < 2:
        raise ConfigError(f"{config.path}: num_experts_per_tok is {topk}; at least 2 can be trained")
    shared = config.get("n_shared_experts", 0)
    dense = config.get("first_k_dense_replace", 0)
    layers = config["num_hidden_layers"]
    return {
        "num_moe_experts": count,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
        "moe_shared_expert_intermediate_size": shared * config["moe_intermediate_size"] or None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_router_dtype": "fp32",
    }
