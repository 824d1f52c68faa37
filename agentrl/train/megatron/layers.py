"""The parts of a transformer layer that megatron-core's local spec lacks without Transformer Engine: RMSNorm and rotary positions of a tree.

The attention is tree_attention.py, with Transformer Engine too. Mixtures of experts are experts.py, latent attention is latent_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from agentrl.train.megatron.families.base import ModelConfig
from agentrl.train.megatron.gpu_kernels import rms_norm, triton_kernels
from agentrl.train.megatron.tree_attention import TreeAttention


class TreeRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding (Su et al. 2021) of given positions; megatron's is that of positions 0, 1, 2 … of one sequence."""

    inv_freq: Tensor
    """[d / 2]"""
    positions: Tensor
    """[s]: of the tokens of the next forward pass, on this context-parallel rank; with `axes` [3, s]"""
    axes: Tensor | None = None
    """[d / 2]: which of a position's three numbers rotates a pair of channels (M-RoPE); None: a position is one number"""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Angles [s, 1, 1, d]."""
        frequencies: Tensor = self.inv_freq.to(self.positions.device)
        positions = self.positions.to(frequencies.dtype)
        angles = (
            positions[self.axes].t() * frequencies if self.axes is not None else torch.outer(positions, frequencies)
        )
        both = angles.repeat_interleave(2, -1) if self.rotary_interleaved else torch.cat([angles, angles], -1)
        return both[:, None, None]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Number of positions."""
        return self.positions.shape[-1]


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019) over the last dimension. megatron refuses torch's under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedSelfAttention(SelfAttention):
    """Self-attention that splits, normalises and rotates queries, keys and values in one kernel (triton_kernels.py)."""

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._angles = rotary_pos_emb
        result: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
        return result

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, 1, heads, d], keys and values [s, 1, groups, d], normalised and rotated."""
        mixed, _ = self.linear_qkv(hidden_states)
        heads = mixed.view(len(mixed), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head)
        weights = (self.q_layernorm.weight, self.k_layernorm.weight) if self.config.qk_layernorm else (None, None)
        kernels = triton_kernels()
        assert kernels is not None
        q, k, v = kernels.split_heads(heads, *weights, self._angles, self.config.layernorm_epsilon)
        return q[:, None], k[:, None], v[:, None]


def fuses_heads(config: Any, model: ModelConfig) -> bool:
    """Whether `FusedSelfAttention` computes the same as megatron's attention, faster."""
    rope, width = model.rope, config.kv_channels
    return bool(
        triton_kernels() is not None
        and config.params_dtype in (torch.bfloat16, torch.float16)
        and width in (64, 128, 256)
        and not (model.latent or rope.yarn or config.rotary_interleaved or rope.channels not in (None, width))
        and config.num_query_groups >= config.tensor_model_parallel_size
    )


class NormedAdd(nn.Module):
    """Adds the norm of a part's output to the residual stream, where megatron adds the output itself."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *_: Any) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """The function of (output, bias), residual stream and probability of dropout that megatron calls."""

        def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            value, bias = output
            normed: Tensor = self.norm(value if bias is None else value + bias)
            return residual + F.dropout(normed, dropout, self.training)

        return add


def layer_spec(config: Any, model: ModelConfig, layer: int, *, adapters: bool = False) -> Any:
    """Layer number `layer` (from 0): of a dense GPT Transformer Engine's linear layers and norms if installed, else megatron's linear layers
    and our norm. With `adapters` always the latter, whose norms are not fused with the linear layers.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.spec_utils import ModuleSpec

    plain = not (model.experts or model.latent or model.post_norms or adapters)
    if specs.HAVE_TE and plain:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        spec.submodules.self_attention.submodules.core_attention = TreeAttention
        return spec
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = TreeAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if fuses_heads(config, model):
        parts.self_attention.module = FusedSelfAttention
    if model.latent:
        from agentrl.train.megatron.latent_attention import TreeLatentAttention

        params = {"latent": model.latent, "rope": model.rope}
        parts.self_attention = ModuleSpec(module=TreeLatentAttention, params=params)
    if model.post_norms:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=NormedAdd, params={"config": config})
    if model.has_experts(layer):
        from agentrl.train.megatron.experts import MixtureLayer, mixture_spec

        spec.module = MixtureLayer
        parts.mlp = mixture_spec()
    return spec


def block_spec(config: Any, model: ModelConfig, *, adapters: bool = False) -> Any:
    """The layers of this pipeline stage and the final norm."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    norm = specs.TENorm if specs.HAVE_TE else RMSNorm
    first = get_transformer_layer_offset(config)
    layers = [layer_spec(config, model, first + i, adapters=adapters) for i in range(get_num_layers_to_build(config))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
