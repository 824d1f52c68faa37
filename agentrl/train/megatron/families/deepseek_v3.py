"""DeepSeek-V3 and R1, Moonlight, Kimi K2: `DeepseekV3ForCausalLM`, with multi-head latent attention and a router bias."""

from __future__ import annotations

from dataclasses import replace

from agentrl.train.megatron.families.base import (
    NORMS,
    HuggingFaceConfig,
    LatentAttention,
    ModelConfig,
    Tensors,
    decoder,
    sigmoid_experts,
)
from agentrl.train.megatron.families.glm4_moe import sigmoid_mlp

_HF, _MEGATRON = "self_attn.", "self_attention."
_LATENT: Tensors = {
    _MEGATRON + "kv_down.weight": ("copy", _HF + "kv_a_proj_with_mqa.weight"),
    _MEGATRON + "kv_norm.weight": ("copy", _HF + "kv_a_layernorm.weight"),
    _MEGATRON + "kv_up.weight": ("rows", _HF + "kv_b_proj.weight"),
    _MEGATRON + "linear_proj.weight": ("columns", _HF + "o_proj.weight"),
}
_QUERIES: Tensors = {_MEGATRON + "q_up.weight": ("rows", _HF + "q_proj.weight")}
_COMPRESSED_QUERIES: Tensors = {
    _MEGATRON + "q_down.weight": ("copy", _HF + "q_a_proj.weight"),
    _MEGATRON + "q_norm.weight": ("copy", _HF + "q_a_layernorm.weight"),
    _MEGATRON + "q_up.weight": ("rows", _HF + "q_b_proj.weight"),
}


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    config.only(attention_bias=False, num_key_value_heads=config["num_attention_heads"])
    latent = LatentAttention(
        query_rank=config.get("q_lora_rank"),
        key_value_rank=config["kv_lora_rank"],
        content_channels=config["qk_nope_head_dim"],
        rotary_channels=config["qk_rope_head_dim"],
        value_channels=config["v_head_dim"],
        interleaved=bool(config.get("rope_interleave", True)),
    )
    head = latent.content_channels + latent.rotary_channels
    rope = config.rope(channels=latent.rotary_channels, yarn=True)
    model = decoder(config, rope=rope, **{**sigmoid_experts(config), "kv_channels": head})
    return replace(model, latent=latent, untrained_layers=config.get("num_nextn_predict_layers", 0))


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    assert model.latent is not None
    queries = _QUERIES if model.latent.query_rank is None else _COMPRESSED_QUERIES
    return {**_LATENT, **queries, **NORMS, **sigmoid_mlp(model, number)}
