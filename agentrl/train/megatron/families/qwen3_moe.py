"""Qwen3-MoE: `Qwen3MoeForCausalLM`, Qwen3 with mixtures of experts."""

from __future__ import annotations

from agentrl.train.megatron.families.base import (
    MLP,
    NORMS,
    QK_NORM,
    QKV,
    ROUTER,
    HuggingFaceConfig,
    ModelConfig,
    Tensors,
    decoder,
    experts,
    softmax_experts,
)


def read(config: HuggingFaceConfig) -> ModelConfig:
    """The model that config.json describes."""
    config.only(attention_bias=False)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    layers = range(config["num_hidden_layers"])
    pattern = [int(i not in dense and (i + 1) % step == 0) for i in layers]
    return decoder(config, qk_layernorm=True, moe_layer_freq=pattern, **softmax_experts(config))


def layer(model: ModelConfig, number: int) -> Tensors:
    """The tensors of a layer."""
    mixture = {**ROUTER, **experts(model.experts)}
    return {**QKV, **QK_NORM, **NORMS, **(mixture if model.has_experts(number) else MLP)}
