"""The parts of a transformer layer that megatron-core's local spec lacks without Transformer Engine: attention and RMSNorm.

`SDPAttention` calls torch's scaled_dot_product_attention (flash kernels on GPU and CPU); the local spec's attention materialises
[b, heads, s, s]. Rows are padded on the right, so under a causal mask no real token attends to padding, and no other mask is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SDPAttention(nn.Module):
    """Causal grouped-query attention of this tensor-parallel rank's heads."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        if config.attention_dropout or config.window_size is not None:
            raise NotImplementedError("SDPAttention supports neither dropout nor sliding windows")
        self.scale: float | None = config.softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]. `attention_mask` must be None (causal)."""
        if attention_mask is not None or packed_seq_params is not None:
            raise NotImplementedError("SDPAttention supports right-padded rows with a causal mask only")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


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
    """The layer of a dense GPT: Transformer Engine's if installed, else megatron's linear layers with the two modules above."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if specs.HAVE_TE:
        return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPAttention
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
