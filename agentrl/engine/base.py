"""The Engine protocol: ids in, ids out. Every engine passes one contract suite (tests/engine_contract.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentrl.core.message_images import PlacedImage
from agentrl.errors import ConfigError, EngineFailure
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
    """of all tensors (agentrl.core.weights_fingerprint); the receiver computes it again"""


@runtime_checkable
class Generator(Protocol):
    """What an episode needs of an engine: sample continuations, then end the session."""

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, *, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample a continuation of `ids`.

        Args:
            ids: the whole context.
            sampling: how to sample.
            session: the episode; its requests stick to one engine and its prefix cache.
            images: where images stand in `ids`, each as many placeholders as it has tokens.

        Raises:
            EngineFailure: no answer, or the context does not fit.
            EngineAbort: the engine gave the request up on purpose.
        """

    async def release(self, session: str) -> None:
        """End the session; its cache may be dropped."""


@runtime_checkable
class Engine(Generator, Protocol):
    """One inference engine, or a fleet behind one address. All methods have bounded waits and raise EngineFailure."""

    async def start(self) -> None:
        """Make ready for `generate`."""

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
        """Take new weights, check their fingerprint, drop the prefix cache, and answer with the new version from now on.

        No generation mixes two versions: requests in flight that hold sampled tokens are given up (EngineAbort), the rest start over.
        Weights that do not fit are refused with EngineFailure and the old ones stay whole.
        """

    async def health(self) -> EngineInfo:
        """Answer within seconds, or raise EngineFailure."""

    async def close(self) -> None:
        """Stop; idempotent."""


def check_request(ids: Sequence[int], sampling: SamplingParams, context_length: int) -> int:
    """The most tokens this request may sample: `max_new_tokens`, or less where the context length leaves less.

    Raises:
        ConfigError: sampling parameters that mean nothing.
        EngineFailure: an empty context, or one that leaves no room for a token.
    """
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1; found {sampling.max_new_tokens}")
    if not 0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature must be a number from 0 up; found {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1; found {sampling.top_p}")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise ConfigError(f"top_k must be at least 1, or -1 for off; found {sampling.top_k}")
    if not all(sampling.stop):
        raise ConfigError("an empty stop string would end every generation before it starts; remove it from `stop`")
    if not ids:
        raise EngineFailure("the context is empty; an engine continues at least one token", "empty context")
    if len(ids) >= context_length:
        raise EngineFailure(
            f"a context of {len(ids)} tokens leaves no room to generate: the engine holds {context_length} tokens of context and generation",
            "context too long",
        )
    return min(sampling.max_new_tokens, context_length - len(ids))
