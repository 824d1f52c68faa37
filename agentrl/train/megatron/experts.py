"""Mixtures of experts without Transformer Engine: the matrices of a rank's experts, and the router, for megatron-core's MoELayer.

megatron-core routes, dispatches and combines (all-to-all over the expert-parallel ranks). Routing is a function of a token's hidden state, or
recorded (routing.py); a token that several rows of a tree share has the same experts in each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from agentrl.train.megatron.routing import RecordedChoice, RoutingPlan

ALIGNMENT = 16
"""bytes to which torch's grouped product wants the rows of its matrices aligned"""


class GroupedExperts(nn.Module):
    """The gate, up and down matrices of this rank's experts, and their SwiGLU of tokens that are sorted by expert."""

    gate: Tensor
    """[experts, width, h]"""
    up: Tensor
    """[experts, width, h]"""
    down: Tensor
    """[experts, h, width]"""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._groups = pg_collection
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self._divided = {"gate": 1, "up": 1, "down": 2}
        """the dimension of each that tensor parallelism divides"""
        for name, dimension in self._divided.items():
            shape = (width, config.hidden_size) if dimension == 1 else (config.hidden_size, width)
            data = torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            parameter = nn.Parameter(data)
            # megatron reduces these gradients over the ranks that have the same experts, and steps these parameters by an optimizer apart,
            # also where all ranks have all experts: checkpoints then have one layout
            parameter.allreduce = False  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
            self.register_parameter(name, parameter)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """tokens [n, h], sorted by expert, and their router weights [n] -> [n, h], weighted."""
        inner = F.silu(grouped_product(tokens, self.gate, tokens_per_expert))
        inner = inner * grouped_product(tokens, self.up, tokens_per_expert)
        out = grouped_product(inner, self.down, tokens_per_expert) * probs[:, None]
        return out.to(tokens.dtype), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), *_: Any, **__: Any) -> dict[str, Any]:
        """The matrices, for a distributed checkpoint: divided by expert and within each expert."""
        groups, before = self._groups, len(sharded_offsets)
        states = {}
        for name, dimension in self._divided.items():
            states[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                getattr(self, name),
                *sharded_offsets,
                (before, groups.ep.rank(), groups.ep.size()),
                (before + dimension, groups.expt_tp.rank(), groups.expt_tp.size()),
                replica_id=(0, 0, groups.expt_dp.rank()),
                prepend_axis_num=before,
            )
        return states


def grouped_product(tokens: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply consecutive runs of tokens by the transposes of different matrices.

    In bf16 on a GPU this is torch's grouped product, else one product after the other.

    Args:
        tokens: [n, k].
        matrices: [e, m, k].
        counts: [e], the number of tokens of each matrix.

    Returns:
        [n, m].
    """
    aligned = all(size * tokens.element_size() % ALIGNMENT == 0 for size in matrices.shape[1:])
    if tokens.is_cuda and tokens.dtype is torch.bfloat16 and aligned and len(tokens):
        ends = counts.cumsum(0).to(tokens.device, torch.int32)
        return F.grouped_mm(tokens, matrices.transpose(1, 2), offs=ends)
    runs = tokens.split(counts.tolist())
    return torch.cat([run @ matrix.t() for run, matrix in zip(runs, matrices.unbind(), strict=True)])


class ExpertRouter(TopKRouter):
    """megatron's router, with a bias that stays in fp32, and a load-balancing loss that counts every token of a tree once and padding never."""

    plan: RoutingPlan
    """of the micro-batch that is computed, or computed again; see `Mixture`"""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move, but do not convert, the bias and the counts that change it."""
        kept = {
            name: buffer
            for name in ("expert_bias", "local_tokens_per_expert")
            if (buffer := getattr(self, name)) is not None
        }
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(self.weight.device))
        return self

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 (megatron's name)
        """Logits [s, 1, E] in fp32 (megatron's own function needs Transformer Engine)."""
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [s, E] and the map of the chosen experts: those that were recorded, where there are some."""
        recorded = self.plan.recorded
        self.router_replay = None if recorded is None else RecordedChoice(recorded[self.layer_number - 1])
        result: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
        return result

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Add the gradient of the load-balancing loss of Switch Transformer (Fedus et al. 2022, equation 4) over a micro-batch:

            coefficient · E · Σ_i f_i P_i
            f_i: share of the tokens' choices that are expert i;  P_i: mean score of expert i, whose sum over i is 1

        Each rank contributes the part of P_i that comes from its tokens.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        valid = self.plan.valid[:, None]
        chosen = (routing_map & valid).sum(0, dtype=torch.float32)
        torch.distributed.all_reduce(chosen, group=self.tp_cp_group)
        tokens = (chosen.sum() / self.topk).clamp(min=1)
        fractions = chosen / (tokens * self.topk)
        means = (scores_for_aux_loss * valid).sum(0) / tokens
        loss = coefficient * self.num_experts * (fractions * means).sum()
        weighted: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * self.plan.share)
        return weighted


class Mixture(MoELayer):
    """megatron's layer of experts, whose router has the plan of the micro-batch also where activations are computed again.

    With pipeline parallelism other micro-batches have passed since.
    """

    plan: RoutingPlan
    moe_layer_recompute: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recomputes, self.moe_layer_recompute = self.moe_layer_recompute, False

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[s, 1, h] -> [s, 1, h]."""
        plan = self.plan

        def compute(x: Tensor) -> tuple[Tensor, None]:
            self.router.plan = plan
            result: tuple[Tensor, None] = super(Mixture, self).forward(x)
            return result

        if not self._recomputes:
            return compute(hidden_states)
        output: Tensor = checkpoint(lambda x: compute(x)[0], False, hidden_states)
        return output, None


class MixtureLayer(TransformerLayer):
    """A transformer layer with experts. megatron passes the plan of a micro-batch to layers, not to their parts."""

    def forward(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See megatron's layer; `packed_seq_params` is an `AttentionPlan` with a routing plan."""
        self.mlp.plan = packed_seq_params.routing
        result: tuple[Tensor, Tensor | None] = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        return result


def mixture_spec() -> ModuleSpec:
    """The MLP of a `MixtureLayer`."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linear)
    submodules = MoESubmodules(router=ExpertRouter, experts=GroupedExperts, shared_experts=shared)
    return ModuleSpec(module=Mixture, submodules=submodules)
