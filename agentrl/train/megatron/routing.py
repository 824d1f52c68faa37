"""The routing of one micro-batch: which tokens count, and the experts that the engine recorded for them (router replay).

A recorded token goes to its recorded experts. Their weights are those of the current router, so that it has gradients (Ma et al. 2025,
Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, "rollout routing replay", R3). Other tokens, such as those after
the last sampled one, are routed by the router alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import InvariantError
from agentrl.train.base import Row
from agentrl.train.megatron.gpu_kernels import to_device

NOT_RECORDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPlan:
    """What the routers need of one micro-batch."""

    valid: Tensor
    """[s] bool: the tokens that are not padding"""
    share: float
    """weight of the micro-batch in the load-balancing loss of a step: 1 / (micro-batches · data-parallel ranks)"""
    recorded: Tensor | None = None
    """[layers, s, topk] int16: recorded experts, or NOT_RECORDED; None: nothing is replayed"""

    def part(self, number: int, parts: int) -> RoutingPlan:
        """That of the tokens of one of several sequence-parallel ranks."""
        recorded = None if self.recorded is None else self.recorded.chunk(parts, 1)[number]
        return replace(self, valid=self.valid.chunk(parts)[number], recorded=recorded)


def recorded_experts(
    rows: Sequence[Row], where: Sequence[np.ndarray], length: int, mine: np.ndarray, device: torch.device | str
) -> Tensor | None:
    """The recorded experts of this rank's tokens `mine` in a layout of `length` tokens, see `RoutingPlan.recorded`.

    Args:
        rows: all of them have recorded experts, or none.
        where: for each row, where its input tokens are in the layout.
        length: tokens of the layout, padding included.
        mine: the tokens of this context-parallel rank.
        device: of the result.

    Raises:
        InvariantError: rows share a token for which different experts were recorded.
    """
    experts = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not experts:
        return None
    layout = np.full((length, *experts[0].shape[1:]), NOT_RECORDED, np.int16)
    places = [places[: len(own)] for places, own in zip(where, experts, strict=True)]
    for place, own in zip(places, experts, strict=True):
        layout[place] = own[: len(place)]
    for row, place, own in zip(rows, places, experts, strict=True):
        if not np.array_equal(layout[place], own[: len(place)]):
            raise InvariantError(f"{row.place(0)}: the row shares tokens with another, whose recorded experts differ")
    return to_device(torch.from_numpy(np.ascontiguousarray(layout[mine].transpose(1, 0, 2))), device)


class RecordedChoice:
    """The choice of one layer's experts, as megatron's `topk_routing_with_score_function` asks for it (`router_replay`)."""

    def __init__(self, recorded: Tensor) -> None:
        """`recorded`: [s, topk], or NOT_RECORDED."""
        self._recorded = recorded

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The scores [s, E] of the chosen experts, and their numbers; each [s, topk]."""
        _, own = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = self._recorded.to(scores.device, own.dtype)
        chosen = torch.where(recorded == NOT_RECORDED, own, recorded)
        return scores.gather(1, chosen), chosen
