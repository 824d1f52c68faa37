"""The Engine protocol: ids in, ids out. Every engine passes one contract suite (tests/engine_contract.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentrl.types import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation."""

    max_new_tokens: int
    """at least 1"""
    temperature: float = 1.0
    """0: greedy, and log-probs at temperature 1; else logits and log-probs are both divided by it"""
    top_p: float = 1.0
    top_k: int = -1
    """-1: off"""
    stop: tuple[str, ...] = ()
    """strings that end the generation; the ids sampled so far are kept as they are, also past the string's end"""
    stop_token_ids: tuple[int, ...] = ()
    """ids that end the generation and are part of it"""
    ignore_eos: bool = False
    """ignore the model's own end token (`stop_token_ids` still count)"""
    seed: int = 0
    """for engines that guarantee determinism"""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine answers."""

    ids: tuple[int, ...]
    """sampled ids, the stop token included if one was sampled; may be empty"""
    log_probs: tuple[float, ...]
    """natural logs of the sampled ids at the temperature asked for"""
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    """the stop string or stop token id that ended it"""
    policy_version: int = 0
    """of the weights that sampled it"""
    cached_tokens: int = 0
    """context tokens that were not computed again"""
    demonstration: bool = False
    """the ids were written by an expert (scripted engine), not sampled: log_probs are meaningless"""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and promises."""

    name: str
    """scripted, local, sglang"""
    version: str
    policy_version: int
    context_length: int
    """most tokens of context and generation together"""
    deterministic: bool
    """the same ids, sampling and seed give the same answer at any load"""


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Named tensors on disk or in shared memory, as `Trainer.export_weights` leaves them."""

    path: Path
    """a folder of *.safetensors files with Hugging Face names"""
    fingerprint: str
    """of all tensors (agentrl.sync.fingerprint); the receiver computes it again"""


@runtime_checkable
class Engine(Protocol):
    """One inference engine, or a fleet behind one address. All methods have bounded waits and raise EngineFailure."""

    async def start(self) -> None:
        """Make ready for `generate`."""

    async def generate(self, ids: Sequence[int], sampling: SamplingParams, *, session: str) -> Generation:
        """Sample a continuation of `ids`. `session` (an episode) sticks to one engine and its prefix cache.

        Raises:
            EngineFailure: no answer, or the context does not fit.
            EngineAbort: given up on purpose.
        """

    async def release(self, session: str) -> None:
        """The session is over; its cache may go."""

    async def pause(self) -> None:
        """Finish no more tokens until `resume`; requests in flight wait."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def abort(self, session: str | None = None) -> None:
        """Give up requests in flight: of one session, or all. They raise EngineAbort."""

    async def sleep(self) -> None:
        """Free memory for the trainer (colocated)."""

    async def wake(self) -> None:
        """Take memory back after `sleep`."""

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Take new weights, check their fingerprint, drop the prefix cache, and answer with the new version from now on."""

    async def health(self) -> EngineInfo:
        """Answer within seconds, or raise EngineFailure."""

    async def close(self) -> None:
        """Stop; idempotent."""
