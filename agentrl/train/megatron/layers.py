"""The parts of a transformer layer that megatron-core's local spec lacks without Transformer Engine: RMSNorm and rotary positions of a tree.

The attention is tree_attention.py, with Transformer Engine too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from agentrl.train.megatron.tree_attention import TreeAttention


class TreeRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding (Su et al. 2021) of given positions; megatron's is that of positions 0, 1, 2 … of one sequence."""

    inv_freq: Tensor
    """[d / 2]"""
    positions: Tensor
    """[s]: of the tokens of the next forward pass, on this context-parallel rank"""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Angles [s, 1, 1, d]."""
        frequencies: Tensor = self.inv_freq.to(self.positions.device)
        angles = torch.outer(self.positions.to(frequencies.dtype), frequencies)
        return torch.cat([angles, angles], -1)[:, None, None]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Number of positions."""
        return len(self.positions)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019) over the last dimension. megatron refuses torch's under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def layer_spec(config: Any) -> Any:
    """The layer of a dense GPT: Transformer Engine's linear layers and norms if installed, else megatron's linear layers and our norm."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if specs.HAVE_TE:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        spec.submodules.self_attention.submodules.core_attention = TreeAttention
        return spec
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TreeAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(config: Any) -> Any:
    """The layers of this pipeline stage and the final norm."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    norm = specs.TENorm if specs.HAVE_TE else RMSNorm
    layers = [layer_spec(config)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
