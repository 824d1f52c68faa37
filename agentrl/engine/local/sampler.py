"""From logits to tokens: each row with its request's parameters and uniform number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.engine.base import SamplingParams


@torch.inference_mode()
def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs for the first len(params) rows of `logits` `[rows, vocab]`; the other rows are padding.

    Temperature 0 takes the largest logit (of equals the lowest id) and gives log-probs at temperature 1. Log-probs are those before top-k and
    top-p. A row of logits that are not finite gives a log-prob that is not finite.
    """
    rows, requests = len(logits), len(params)
    temperature = torch.ones(rows, 1)
    temperature[:requests, 0] = torch.tensor([p.temperature or 1.0 for p in params])
    log_probs = torch.log_softmax(logits.float() / temperature.to(logits.device), -1)
    probs = log_probs.double().exp_()
    for i, p in enumerate(params):
        if p.temperature and (p.top_k > 0 or p.top_p < 1):
            probs[i] = _truncate(probs[i], p.top_k, p.top_p)
    tokens = _inverse_cdf(probs, uniforms)
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params] + [False] * (rows - requests), device=logits.device)
        tokens = torch.where(greedy, log_probs.argmax(-1), tokens)
    sampled = log_probs.gather(1, tokens[:, None])[:, 0]
    return tokens[:requests].tolist(), sampled[:requests].tolist()


def _inverse_cdf(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The first id whose cumulative probability exceeds the row's uniform number times the row's sum."""
    cdf = probs.cumsum_(-1)
    u = torch.zeros(len(probs), 1, dtype=torch.float64)
    u[: len(uniforms), 0] = torch.tensor(uniforms, dtype=torch.float64)
    target = u.to(cdf.device) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


def _truncate(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """One row with 0 outside the `top_k` most likely ids, and outside the smallest set of most likely ids that has mass `top_p`."""
    ordered, order = probs.sort(descending=True, stable=True)
    keep = ordered.cumsum(0) - ordered < top_p
    if top_k > 0:
        keep[top_k:] = False
    return torch.zeros_like(probs).index_copy_(0, order, ordered * keep)
