"""GLM-4.5 and later mixtures of experts: `Glm4MoeForCausalLM`, with half of the channels rotated, a shared expert and a router bias."""

from __future__ import annotations

from dataclasses import replace

from agentrl.train.megatron.families.base import (
    MLP,
    NORMS,
    QK_NORM,
    QKV,
    QKV_BIAS,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERT,
    HuggingFaceConfig,
    ModelConfig,
    Rope,
    Tensors,
    decoder,
    experts,
    sigmoid_experts,
)


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    attention = {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
    }
    model = decoder(config, rope=partial_rope(config), **attention, **sigmoid_experts(config))
    return replace(model, untrained_layers=config.get("num_nextn_predict_layers", 0))


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    bias = QKV_BIAS if model.transformer["add_qkv_bias"] else {}
    norm = QK_NORM if model.transformer["qk_layernorm"] else {}
    return {**QKV, **bias, **norm, **NORMS, **sigmoid_mlp(model, number)}


def sigmoid_mlp(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a dense MLP, or of a mixture with a router bias and maybe a shared expert."""
    if not model.has_experts(number):
        return MLP
    shared = SHARED_EXPERT if model.transformer["moe_shared_expert_intermediate_size"] else {}
    return {**ROUTER, **ROUTER_BIAS, **experts(model.experts), **shared}


def partial_rope(config: HuggingFaceConfig) -> Rope:
    """The rotary embedding of a part of a head's channels."""
    nested = config.get("rope_parameters", {}).get("partial_rotary_factor")
    factor = nested or config.get("partial_rotary_factor", 0.5)
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config.rope(channels=int(head * factor))
