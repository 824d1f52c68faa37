"""GLM-4 and GLM-Z1, dense, of 2025: `Glm4ForCausalLM`, with half of the channels rotated in pairs of neighbours, and norms after each part."""

from __future__ import annotations

from dataclasses import replace

from agentrl.train.megatron.families.base import (
    NORMS,
    QKV,
    QKV_BIAS,
    HuggingFaceConfig,
    ModelConfig,
    Tensors,
    decoder,
)
from agentrl.train.megatron.families.glm4_moe import partial_rope

MLP: Tensors = {
    "mlp.linear_fc1.weight": ("glu_joined", "mlp.gate_up_proj.weight"),
    "mlp.linear_fc2.weight": ("columns", "mlp.down_proj.weight"),
}
POST_NORMS: Tensors = {
    "self_attn_bda.norm.weight": ("copy", "post_self_attn_layernorm.weight"),
    "mlp_bda.norm.weight": ("copy", "post_mlp_layernorm.weight"),
}


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    bias = bool(config.get("attention_bias", False))
    model = decoder(config, rope=partial_rope(config), add_qkv_bias=bias, rotary_interleaved=True)
    return replace(model, post_norms=True)


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    bias = QKV_BIAS if model.transformer["add_qkv_bias"] else {}
    return {**QKV, **bias, **NORMS, **MLP, **POST_NORMS}
