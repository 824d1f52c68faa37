"""Llama 3 (and 2): `LlamaForCausalLM`."""

from __future__ import annotations

from agentrl.train.megatron.families.base import (
    FUSED_NORMS,
    MLP,
    NORMS,
    QKV,
    HuggingFaceConfig,
    ModelConfig,
    Tensors,
    decoder,
)


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    config.only(attention_bias=False)
    return decoder(config)


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    return {**QKV, **NORMS, **MLP, **FUSED_NORMS}
