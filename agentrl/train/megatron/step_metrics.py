"""Step metrics: the totals that ranks add up (computed in loss.py), and the metrics made from them. No torch."""

from __future__ import annotations

from agentrl.train.base import LossConfig

SUMS = ("loss", "pg_loss", "kl", "entropy", "clipped", "tis", "ratio", "weight", "diff", "sampled", "tokens")
"""Statistics that are summed over micro-batches and ranks, in the order of loss.py."""
MAXIMA = ("diff_max", "ratio_max", "tis_max")
"""Statistics of which the maximum is taken, in the order of loss.py."""


def step_metrics(sums: dict[str, float], maxima: dict[str, float], loss: LossConfig) -> dict[str, float]:
    """The metrics of `Trainer.step` from the totals of all ranks. Means use the loss's weights; those of log-prob differences count tokens."""
    weight, sampled = sums["weight"] or 1.0, sums["sampled"] or 1.0
    if loss.kind == "value":
        return {"loss": sums["loss"], "clip_fraction": sums["clipped"] / weight}
    metrics = {"loss": sums["loss"], "entropy": sums["entropy"] / weight, "trained_tokens": sums["tokens"]}
    if loss.kind == "sft":
        return metrics
    metrics |= {
        "pg_loss": sums["pg_loss"],
        "kl_loss": sums["kl"] / weight,
        "clip_fraction": sums["clipped"] / weight,
        "ratio_mean": sums["ratio"] / weight,
        "ratio_max": maxima["ratio_max"],
        "rollout_log_prob_diff_mean": sums["diff"] / sampled,
        "rollout_log_prob_diff_max": maxima["diff_max"],
    }
    if loss.use_tis:
        metrics |= {"tis_mean": sums["tis"] / weight, "tis_max": maxima["tis_max"]}
    return metrics
