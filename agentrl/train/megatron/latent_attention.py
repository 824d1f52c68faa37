"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1) over a token tree, in its expanded form.

    c_q = norm(W_dq h)             q = W_uq c_q, for each head [content | rotary]       (without compression: q = W_q h)
    [c | k_r] = W_dkv h            for each head [k_c | v] = W_ukv norm(c);  k = [k_c | k_r], with k_r the same for all heads
    out = W_o softmax(q kᵀ · scale) v

The rotary parts of q and k_r are rotated. The down projections are whole on every tensor-parallel rank; heads are divided.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from agentrl.train.megatron.families.base import LatentAttention, Rope
from agentrl.train.megatron.gpu_kernels import rotate
from agentrl.train.megatron.layers import RMSNorm
from agentrl.train.megatron.rotary import attention_factor, latent_scale
from agentrl.train.megatron.tree_attention import TreeAttention

NORM_EPS = 1e-6
"""of the norms of compressed vectors, whatever config.json says of the others"""


class WholeLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has whole, over the tokens of its sequence-parallel part."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        data = torch.empty(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(data)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class TreeLatentAttention(MegatronModule):
    """The attention of one layer, for megatron's TransformerLayer."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        latent: LatentAttention,
        rope: Rope,
        attn_mask_type: Any = AttnMaskType.causal,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.latent, self.rope = latent, rope
        self.tensor_group = pg_collection.tp
        heads, head = config.num_attention_heads, latent.content_channels + latent.rotary_channels
        hidden, init = config.hidden_size, config.init_method

        def up(inputs: int, outputs: int) -> ColumnParallelLinear:
            options = {"bias": False, "gather_output": False, "tp_group": self.tensor_group}
            return ColumnParallelLinear(inputs, outputs, config=config, init_method=init, **options)

        if latent.query_rank is not None:
            self.q_down = WholeLinear(config, hidden, latent.query_rank)
            self.q_norm = RMSNorm(config, latent.query_rank, NORM_EPS)
        self.q_up = up(latent.query_rank or hidden, heads * head)
        self.kv_down = WholeLinear(config, hidden, latent.key_value_rank + latent.rotary_channels)
        self.kv_norm = RMSNorm(config, latent.key_value_rank, NORM_EPS)
        self.kv_up = up(latent.key_value_rank, heads * (latent.content_channels + latent.value_channels))
        self.linear_proj = RowParallelLinear(
            heads * latent.value_channels,
            hidden,
            config=config,
            init_method=init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tensor_group,
        )
        self.core_attention = TreeAttention(
            config, layer_number, attn_mask_type, "self", softmax_scale=latent_scale(rope, head)
        )

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [s, 1, h] -> [s, 1, h]; with sequence parallelism both are this rank's part."""
        m = self.latent
        compressed = self.kv_down(hidden_states)
        content, k_rotary = compressed.split([m.key_value_rank, m.rotary_channels], -1)
        k_rotary = self._of_all_tokens(k_rotary)
        queries = hidden_states if m.query_rank is None else self.q_norm(self.q_down(hidden_states))
        q, kv = self.q_up(queries)[0], self.kv_up(self.kv_norm(content))[0]
        tokens = q.shape[0]
        q = q.view(tokens, 1, -1, m.content_channels + m.rotary_channels)
        heads = q.shape[2]
        k_content, v = kv.view(tokens, 1, heads, -1).split([m.content_channels, m.value_channels], -1)
        q_content, q_rotary = q.split([m.content_channels, m.rotary_channels], -1)
        q = torch.cat([q_content, self._rotate(q_rotary, rotary_pos_emb)], -1)
        k_rotary = self._rotate(k_rotary[:, :, None], rotary_pos_emb).expand(-1, -1, heads, -1)
        k = torch.cat([k_content, k_rotary], -1)
        out, _ = self.linear_proj(self.core_attention(q, k, v, None, packed_seq_params))
        return out, None

    def _of_all_tokens(self, k_rotary: Tensor) -> Tensor:
        """The rotary keys of the whole sequence. The heads of all ranks add to their gradient."""
        if self.tensor_group.size() == 1:
            return k_rotary
        if self.config.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(k_rotary, group=self.tensor_group)
            return gathered
        copied: Tensor = copy_to_tensor_model_parallel_region(k_rotary, group=self.tensor_group)
        return copied

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.latent.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        return rotate(x, angles, mscale=attention_factor(self.rope))
