"""What a step reports: totals that ranks add up (train/megatron/loss.py computes them), and the numbers a person reads. No torch."""

from __future__ import annotations

from agentrl.train.base import LossConfig

SUMS = ("loss", "pg_loss", "kl", "entropy", "clipped", "tis", "ratio", "weight", "diff", "sampled", "tokens")
"""statistics that add up over micro-batches and ranks, in this order"""
MAXIMA = ("diff_max", "ratio_max", "tis_max")
"""statistics of which the largest counts"""


def metrics(sums: dict[str, float], maxima: dict[str, float], loss: LossConfig) -> dict[str, float]:
    """Turn the totals over all ranks into what `Trainer.step` returns; means are weighted as the loss is, log-prob differences by token."""
    weight, sampled = sums["weight"] or 1.0, sums["sampled"] or 1.0
    out = {"loss": sums["loss"], "entropy": sums["entropy"] / weight, "trained_tokens": sums["tokens"]}
    if loss.kind == "sft":
        return out
    out |= {
        "pg_loss": sums["pg_loss"],
        "kl_loss": sums["kl"] / weight,
        "clip_fraction": sums["clipped"] / weight,
        "ratio_mean": sums["ratio"] / weight,
        "ratio_max": maxima["ratio_max"],
        "rollout_log_prob_diff_mean": sums["diff"] / sampled,
        "rollout_log_prob_diff_max": maxima["diff_max"],
    }
    if loss.use_tis:
        out |= {"tis_mean": sums["tis"] / weight, "tis_max": maxima["tis_max"]}
    return out
