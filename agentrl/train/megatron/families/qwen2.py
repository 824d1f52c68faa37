"""Qwen2 and Qwen2.5: `Qwen2ForCausalLM`, with biases on q, k and v."""

from __future__ import annotations

from agentrl.train.megatron.families.base import (
    FUSED_NORMS,
    MLP,
    NORMS,
    QKV,
    QKV_BIAS,
    HuggingFaceConfig,
    ModelConfig,
    Tensors,
    decoder,
)


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    return decoder(config, add_qkv_bias=True)


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    return {**QKV, **QKV_BIAS, **NORMS, **MLP, **FUSED_NORMS}
