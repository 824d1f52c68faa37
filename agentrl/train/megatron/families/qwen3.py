"""Qwen3: `Qwen3ForCausalLM`, with norms on q and k."""

from __future__ import annotations

from agentrl.train.megatron.families.base import (
    FUSED_NORMS,
    MLP,
    NORMS,
    QK_NORM,
    QKV,
    HuggingFaceConfig,
    ModelConfig,
    Tensors,
    decoder,
)


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    config.only(attention_bias=False)
    return decoder(config, qk_layernorm=True)


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    return {**QKV, **QK_NORM, **NORMS, **MLP, **FUSED_NORMS}
