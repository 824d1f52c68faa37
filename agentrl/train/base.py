"""The `Trainer` protocol, its rows, and its loss settings. numpy only: torch stays behind the protocol.

All normalisation happens before the trainer sees a batch: `Row.weights` holds mask / global denominator for every token. The trainer adds up
weight × loss and nothing else, so any split into micro-batches, data parallel or pipeline parallel ranks gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import WeightsManifest
from agentrl.errors import InvariantError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence. Every array has one entry per token; entry t belongs to the prediction of token t from the tokens before it."""

    tokens: NDArray[np.int32]
    weights: Floats
    """loss_mask / global denominator; 0 where the token is not trained"""
    advantages: Floats
    """0 where the token is not trained"""
    rollout_log_probs: Floats
    """the engine's; 0 where the token was not sampled"""
    temperature: Floats
    """the sampling temperature; 1 for tokens that were not sampled, and for greedy turns"""
    old_log_probs: Floats | None = None
    """the trainer's, with the weights before the first optimizer step of the rollout; None: the loss uses its own, detached (ratio 1)"""
    ref_log_probs: Floats | None = None
    """the frozen reference model's; required for the KL term"""
    proximal_weight: Floats | None = None
    """where log π_prox lies between the engine's log-prob (0) and the current one (1); used in place of `old_log_probs`; None: not interpolated"""
    sequence_log_ratio: Floats | None = None
    """mean of log π − log π_old over the trained tokens of the episode, under the weights of this step; None: 0"""
    importance_log_ratio: Floats | None = None
    """sum of log π_old − log π_rollout over the turn or the episode; None: the importance weight is that of the token"""
    values: Floats | None = None
    """the critic's value of the context before the token, with its weights before the rollout's first step"""
    returns: Floats | None = None
    """the critic's target"""
    sampled: NDArray[np.bool_] | None = None
    """where the engine sampled the token, and so `rollout_log_probs` holds its log-prob, which may be 0; None: every trained token"""
    routed_experts: NDArray[Any] | None = None
    """[n, layers, topk]: the experts of the first n tokens in the engine, which the trainer uses too; None: its routers choose"""
    images: tuple[PlacedImage, ...] = ()
    """the images among the tokens, in order, with their PNGs in memory"""
    source: tuple[str, int] = ("", 0)
    """(episode id, segment index) that the row was made from"""
    turns: tuple[tuple[int, int], ...] = ()
    """runs (turn index, tokens) of the last tokens; those before them are the prompt"""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("weights", "advantages", "rollout_log_probs", "temperature", *OPTIONAL_INPUTS):
            values = getattr(self, name)
            if values is None:
                continue
            if values.shape != (length,):
                raise InvariantError(f"Row.{name} has shape {values.shape}, tokens {(length,)}")
            if not np.isfinite(values).all():
                token = int(np.flatnonzero(~np.isfinite(values))[0])
                raise InvariantError(f"Row.{name} is not finite at {self.place(token)}")
        if self.sampled is not None and (self.sampled.shape != (length,) or self.sampled.dtype != np.bool_):
            raise InvariantError(
                f"Row.sampled is {self.sampled.dtype} of shape {self.sampled.shape}, expected bool of {(length,)}"
            )
        self._check_routed_experts()
        self._check_images()
        if length and self.weights[0] != 0:
            raise InvariantError("the first token has no context and cannot be trained on")

    def _check_routed_experts(self) -> None:
        """A prediction depends on the experts of every token before it."""
        if self.routed_experts is None:
            return
        given, needed = len(self.routed_experts), int(np.flatnonzero(self.weights)[-1]) if self.weights.any() else 0
        if not needed <= given <= len(self.tokens):
            raise InvariantError(
                f"{self.place(0)}: experts were recorded for {given} tokens; the row has {len(self.tokens)}, and those of the first {needed} "
                "are needed"
            )

    def _check_images(self) -> None:
        """Images follow one another among the tokens, and are not trained."""
        end = 0
        for placed in self.images:
            start, end = end, placed.at + placed.tokens
            if not start <= placed.at < end <= len(self.tokens):
                raise InvariantError(
                    f"{self.place(0)}: an image has the tokens {placed.at} to {end - 1}; the row has {len(self.tokens)}, and the image before it "
                    f"ends at {start}"
                )
            if self.weights[placed.at : end].any():
                raise InvariantError(f"{self.place(placed.at)}: tokens of an image are never trained")

    def chosen(self, *, trained_only: bool) -> NDArray[np.int64]:
        """The tokens whose log-probs are computed: those with a weight, or all but the first."""
        return np.flatnonzero(self.weights) if trained_only else np.arange(1, max(len(self.tokens), 1))

    def place(self, token: int) -> str:
        """Where a token is, for messages: episode, segment, turn and token."""
        end = len(self.tokens) - sum(count for _, count in self.turns)
        turn = "the prompt"
        for index, count in self.turns:
            if token < end:
                break
            turn, end = f"turn {index}", end + count
        episode, segment = self.source
        return f"episode {episode or '(unnamed)'}, segment {segment}, {turn}, token {token}"


OPTIONAL_INPUTS = (
    "old_log_probs",
    "ref_log_probs",
    "proximal_weight",
    "sequence_log_ratio",
    "importance_log_ratio",
    "values",
    "returns",
)
"""Arrays that all rows of a step have, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The loss of one optimizer step; train/megatron/loss.py has the formulas and their sources."""

    kind: str = "policy"
    """'policy', 'sft' (cross entropy) or 'value' (of the critic)"""
    policy_loss: str = "clip"
    """'clip' (PPO), 'sequence' (GSPO) or 'cispo'"""
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    """None: same as eps_clip"""
    eps_clip_c: float | None = None
    """dual clip bound (> 1); None: no dual clip"""
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    """k1, k2, k3, low_var_kl"""
    use_unbiased_kl: bool = False
    """multiply the KL estimate by π / π_old"""
    entropy_coef: float = 0.0
    use_tis: bool = False
    """multiply by exp(old - rollout), detached, bounded by `tis_clip_low` and `tis_threshold`"""
    tis_mode: str = "truncate"
    """'truncate': weights outside the bounds become the bound; 'mask': they become 0"""
    tis_threshold: float = 2.0
    tis_clip_low: float = 0.0
    value_clip: float | None = None
    """clip range of a value's change since the rollout; None: not clipped"""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A server that receives weights."""

    address: str
    ranks: int
    """tensor-parallel size of the server"""


@dataclass(slots=True, kw_only=True)
class DeliveryReport:
    """The result of one pipeline stage's delivery of weights."""

    failed: dict[str, str] = field(default_factory=dict)
    """server address -> what went wrong"""
    bytes: int = 0
    buckets: int = 0
    seconds: float = 0.0


class Critic(Protocol):
    """A value model on its own trainer ranks; started only for estimators that need values."""

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """The value of the context before each token with a weight; 0 elsewhere."""

    def step(self, rows: Sequence[Row], loss: LossConfig, lr: float) -> dict[str, Any]:
        """One optimizer step towards `Row.returns`; returns metrics."""

    def save(self, path: Path) -> None:
        """See `Trainer.save`."""

    def load(self, path: Path) -> None:
        """See `Trainer.load`."""

    def offload(self) -> None:
        """See `Trainer.offload`."""

    def onload(self) -> None:
        """See `Trainer.onload`."""

    def close(self) -> None:
        """Stop all ranks; idempotent."""


class Trainer(Protocol):
    """A group of trainer ranks behind one object of the controller. Methods block; the training loop calls them in a thread.

    Every wait is bounded. A rank that died, hung or raised is a WorkerError with the end of its log.
    """

    dtype: str
    """float32 or bfloat16"""
    copies: int
    """data-parallel size"""
    stages: int
    """pipeline-parallel size"""
    micro_batch_tokens: int
    """maximum tokens of a micro-batch, padding included, on all its context-parallel ranks together"""
    micro_batch_rows: int | None
    """maximum rows of a micro-batch; None: no such bound"""
    multiple: int
    """the tokens of a micro-batch are padded to a multiple of this"""
    tree_packing: bool
    """a prefix that rows of a micro-batch share is computed once"""
    restarts: int
    """how often the ranks were started again; a group of ranks and servers ends with them"""
    adapters: tuple[str, ...]
    """names of several adapters, one of which every command on weights then names; (): one set of weights"""

    def log_probs(
        self,
        rows: Sequence[Row],
        *,
        reference: bool = False,
        trained_only: bool = False,
        adapter: str | None = None,
    ) -> list[Floats]:
        """Per-token log-probs of the current or the reference model, at each row's temperature. Entry 0 is 0.

        `trained_only`: only where `Row.weights` is not 0, and 0 elsewhere; cheaper.
        """

    def step(
        self,
        rows: Sequence[Row],
        loss: LossConfig,
        lr: float,
        *,
        profile: Path | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """One optimizer step on the global batch. Returns metrics (loss, grad_norm, clip_fraction …), `log_probs` and `rates`.

        `log_probs` equals `log_probs(rows, trained_only=True)` just before the step; the forward pass computes them anyway. `rates` depend on
        time: tokens_per_s (without padding), mfu, optimizer_mib, peak_memory_mib_max. `profile`: a folder that receives a trace by each rank.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; nothing was changed.
        """

    def deliver(self, action: str, **arguments: Any) -> list[Any]:
        """Run a method of `Sender` (train/megatron/delivery/sender.py) on every rank; results of the stages' first ranks, by stage."""

    def export_weights(self, path: Path, *, adapter: str | None = None) -> WeightsManifest:
        """Write the weights under Hugging Face names as safetensors into the new folder `path`, one file per pipeline stage."""

    def export_adapter(self, path: Path, *, adapter: str | None = None) -> None:
        """Write the adapters as peft does into the new folder `path`, of a trainer that trains adapters."""

    def save(self, path: Path) -> None:
        """Write model, optimizer and random state into the new folder `path` (distributed checkpoint)."""

    def begin_save(self, path: Path) -> Callable[[], None]:
        """Start to write what `save` writes into the new folder `path`, from a copy of the state in host memory.

        Returns a function that waits until it is written; the folder is complete only then. Other methods work in between, and change nothing of it.
        """

    def load(self, path: Path) -> None:
        """Read what `save` wrote. Training then continues bit-exactly."""

    def offload(self) -> None:
        """Free the GPU memory (colocated)."""

    def onload(self) -> None:
        """Load the memory that `offload` freed."""

    def free_mib(self) -> int | None:
        """Free memory of the first rank's GPU in MiB, whichever process uses the rest; None on a CPU."""

    def close(self) -> None:
        """Stop all ranks; idempotent."""


class AdapterTrainer:
    """A trainer of several adapters as the trainer of one of them, for what computes log-probs and takes steps.

    Args:
        trainer: of all.
        name: of the adapter.
    """

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer = trainer
        self.log_probs = partial(trainer.log_probs, adapter=name)
        self.step = partial(trainer.step, adapter=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)
