"""The Trainer protocol and the batch it is fed. numpy only: torch stays behind the protocol.

Everything about normalisation is decided before the trainer sees a batch: `Row.weights` holds, for every token, mask / denominator
with the global denominator already in it (design §7). The trainer adds up weight × loss and nothing else, so any split into
micro-batches, DP, CP or PP gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.engine.base import WeightsManifest
from agentrl.errors import InvariantError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as the trainer takes it. Arrays have one entry per token; entry t speaks of token t given tokens < t (entry 0: nothing)."""

    tokens: NDArray[np.int32]
    weights: Floats
    """loss_mask / global denominator; 0 where the token is not trained"""
    advantages: Floats
    """0 where the token is not trained"""
    rollout_log_probs: Floats
    """by the engine; 0 where not sampled"""
    temperature: Floats
    """that the token was sampled at; 1 elsewhere (and for greedy turns)"""
    old_log_probs: Floats | None = None
    """by the trainer with the weights at the start of the step; None: the loss takes its own, detached (ratio 1)"""
    ref_log_probs: Floats | None = None
    """by the frozen reference; needed for KL"""
    source: tuple[str, int] = ("", 0)
    """episode id and segment that it was made from, for the record"""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("weights", "advantages", "rollout_log_probs", "temperature", "old_log_probs", "ref_log_probs"):
            a = getattr(self, name)
            if a is None:
                continue
            if a.shape != (n,):
                raise InvariantError(f"Row.{name} has shape {a.shape}, tokens {(n,)}")
            if not np.isfinite(a).all():
                raise InvariantError(f"Row.{name} is not finite at {int(np.flatnonzero(~np.isfinite(a))[0])}")
        if n and self.weights[0] != 0:
            raise InvariantError("the first token has no context and cannot be trained on")


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss of one optimizer step; see train/megatron/loss.py for the formulas and their sources."""

    kind: str = "policy"
    """'policy' (clipped surrogate) or 'sft' (cross entropy)"""
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    """None: as eps_clip"""
    eps_clip_c: float | None = None
    """dual clip bound (> 1); None: off"""
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    """k1, k2, k3"""
    entropy_coef: float = 0.0
    use_tis: bool = False
    """multiply by exp(old - rollout), detached, truncated at `tis_threshold`"""
    tis_threshold: float = 2.0


class Trainer(Protocol):
    """A group of trainer ranks behind one object of the controller. Methods block (the loop calls them off the event loop).

    Every wait is bounded; a rank that died, hung or raised is a WorkerError with the end of its log.
    """

    def log_probs(self, rows: Sequence[Row], *, reference: bool = False, trained_only: bool = False) -> list[Floats]:
        """Per-token log-probs of the current (or the frozen reference) weights, each row's temperature applied; entry 0 is 0.

        `trained_only`: only where `Row.weights` is not 0, the rest is 0; cheaper.
        """

    def step(self, rows: Sequence[Row], loss: LossConfig, lr: float) -> dict[str, Any]:
        """One optimizer step on the global batch. Returns loss, grad_norm, clip_fraction, kl, entropy, rollout_log_prob_diff_mean / _max …

        And `log_probs`, as `log_probs(rows, trained_only=True)` would have given them just before the step: its forward computes them anyway.
        """

    def export_weights(self, path: Path) -> WeightsManifest:
        """Write the weights under Hugging Face names as safetensors into a new folder `path`, one file per pipeline stage."""

    def save(self, path: Path) -> None:
        """Write model, optimizer and random state into a new folder (distributed checkpoint)."""

    def load(self, path: Path) -> None:
        """Read what `save` wrote; afterwards everything goes on to the bit."""

    def offload(self) -> None:
        """Give GPU memory back (colocated)."""

    def onload(self) -> None:
        """Take it again."""

    def free_mib(self) -> int | None:
        """Free memory of the first rank's GPU, whoever uses the rest, in MiB; None on a CPU."""

    def close(self) -> None:
        """Stop all ranks; idempotent."""
