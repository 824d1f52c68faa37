"""The protocols of engines: token ids in, token ids out. Every engine passes one contract suite (tests/engine_contract.py)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from agentrl.core.message_images import PlacedImage
from agentrl.core.routed_experts import RoutedExperts
from agentrl.errors import ConfigError, EngineFailure, shown
from agentrl.types import FinishReason

MAX_LOG_PROB = 1e-3
"""Largest log-prob that an engine may return: rounding can lift that of a certain token above 0."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation."""

    max_new_tokens: int
    """at least 1"""
    temperature: float = 1.0
    """divides the logits before sampling, and so affects the log-probs; 0: greedy, with log-probs at temperature 1"""
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit"""
    stop: tuple[str, ...] = ()
    """strings that end the generation; all ids sampled so far are kept, also those past the string's end"""
    stop_token_ids: tuple[int, ...] = ()
    """ids that end the generation; the id is part of it"""
    ignore_eos: bool = False
    """do not stop at the model's end token; `stop_token_ids` still apply"""
    seed: int = 0
    """seed of the generation; used by deterministic engines"""
    routed_experts_from: int | None = None
    """return the experts of all tokens from this position on, but the last that is sampled (router replay); None: return none"""
    adapter: str | None = None
    """which of several adapters samples; None: the engine's one set of weights"""


class Speculation(NamedTuple):
    """Counts of speculative decoding."""

    verify_steps: int
    """forward passes of the model, each of which verified drafts and added at least one token"""
    accepted: int
    """draft tokens that the model accepted"""
    proposed: int
    """draft tokens that were proposed"""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of `generate`."""

    ids: tuple[int, ...]
    """sampled ids, including the stop token if one was sampled; may be empty"""
    log_probs: tuple[float, ...]
    """natural logarithms of the sampled ids' probabilities, at the requested temperature"""
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    """the stop string or stop token id that ended it"""
    policy_version: int = 0
    """version of the weights that sampled it"""
    cached_tokens: int = 0
    """context tokens that the prefix cache had"""
    demonstration: bool = False
    """an expert wrote the ids (scripted engine); log_probs are meaningless"""
    versions: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) in order, where a weight update interrupted the generation and it continued with its tokens; empty:
    `policy_version` sampled all of them, else that is the last"""
    speculation: Speculation | None = None
    """None: the engine did not speculate"""
    routed_experts: RoutedExperts | None = None
    """of the tokens from `SamplingParams.routed_experts_from` on; None: not requested"""
    context_crc: int | None = None
    """checksum (`agentrl.core.sequences.ids_checksum`) of the context ids that were sampled from, computed where they leave for the engine;
    None: a recorded generation, of which nothing was sent"""

    def counts(self) -> dict[str, float]:
        """What `Turn.timings` holds besides seconds."""
        counts: dict[str, float] = {"cached_tokens": self.cached_tokens}
        if self.speculation is not None:
            counts |= {f"spec_{name}": value for name, value in self.speculation._asdict().items()}
        return counts


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine."""

    name: str
    """scripted, local, sglang"""
    version: str
    policy_version: int
    context_length: int
    """maximum tokens of context and generation together"""
    deterministic: bool
    """the same ids, sampling parameters and seed give the same generation at any load"""


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """A folder of named tensors on disk or in shared memory, as written by `Trainer.export_weights`."""

    path: Path
    """*.safetensors files with Hugging Face names"""
    fingerprint: str
    """fingerprint of all tensors (agentrl.core.weights_fingerprint); the receiver verifies it"""


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
            images: positions of images in `ids`; each has as many placeholders as it has tokens.

        Raises:
            EngineFailure: no answer, or the context does not fit.
            EngineAbort: the request was aborted on purpose.
        """

    async def release(self, session: str) -> None:
        """End the session; its cache may be dropped."""


@runtime_checkable
class Engine(Generator, Protocol):
    """One inference engine, or a fleet behind one address. All methods have bounded waits and raise EngineFailure."""

    async def start(self) -> None:
        """Prepare for `generate`."""

    async def pause(self) -> None:
        """Sample no more tokens until `resume`; requests in flight wait."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def abort(self, session: str | None = None) -> None:
        """Abort requests in flight, of one session or all. They raise EngineAbort."""

    async def sleep(self) -> None:
        """Free GPU memory for the trainer (colocated)."""

    async def wake(self) -> None:
        """Allocate the memory that `sleep` freed."""

    async def update_weights(self, weights: WeightsManifest, policy_version: int) -> None:
        """Load new weights after verifying their fingerprint, drop the prefix cache, and serve `policy_version` from now on.

        Requests in flight without sampled tokens start again. Those with tokens are aborted (EngineAbort), unless the engine was told to
        keep them (`keep_interrupted`): then they continue with the new weights, and `Generation.versions` says which sampled which tokens.

        Raises:
            EngineFailure: the weights do not fit. The old weights are unchanged.
        """

    async def health(self) -> EngineInfo:
        """The engine's properties, within seconds; EngineFailure if it does not respond."""

    async def close(self) -> None:
        """Stop; idempotent."""


def check_generation(generation: object, max_new_tokens: int) -> Generation:
    """The argument, if it is what `generate` may return: engines are not believed.

    Raises:
        EngineFailure: the ids are too many or not token ids, or the log-probs are not one finite number of at most 0 for each.
    """
    if not isinstance(generation, Generation) or not isinstance(generation.finish_reason, FinishReason):
        raise EngineFailure(
            f"the engine returned {type(generation).__name__}, expected a Generation with a FinishReason",
            "engine: not a generation",
        )
    ids, log_probs = generation.ids, generation.log_probs
    if len(ids) > max_new_tokens:
        raise EngineFailure(
            f"requested at most {max_new_tokens} tokens, the engine returned {len(ids)}", "engine: too many tokens"
        )
    try:
        valid = not ids or max(array("I", ids)) < 1 << 31
    except (OverflowError, TypeError):
        valid = False
    if not valid:
        raise EngineFailure(
            f"the engine sampled {shown(ids)}, expected ids of at least 0", "engine: ids outside the vocabulary"
        )
    if generation.versions and sum(count for _, count in generation.versions) != len(ids):
        raise EngineFailure(
            f"the engine names the versions of {sum(count for _, count in generation.versions)} tokens and returned {len(ids)}",
            "engine: versions of other tokens",
        )
    if generation.demonstration:
        return generation
    if len(log_probs) != len(ids):
        raise EngineFailure(
            f"the engine returned {len(ids)} ids and {len(log_probs)} log-probs", "engine: ids and log-probs differ"
        )
    try:
        valid = not log_probs or (isfinite(sum(log_probs)) and max(log_probs) <= MAX_LOG_PROB)
    except TypeError:
        valid = False
    if not valid:
        raise EngineFailure(
            "the engine returned log-probs that are not finite numbers or above 0", "engine: log-probs not finite"
        )
    return generation


def check_routed_experts(generation: Generation, sampling: SamplingParams, context_length: int) -> None:
    """Refuse a generation whose experts are not those of the tokens that were asked for.

    Raises:
        EngineFailure: they are missing, or of more or fewer tokens.
    """
    start = sampling.routed_experts_from
    if start is None or generation.demonstration or not generation.ids:
        return
    expected = context_length + len(generation.ids) - 1 - start
    found = -1 if generation.routed_experts is None else generation.routed_experts.tokens
    if found != expected:
        count = "none" if found < 0 else f"those of {found} tokens"
        raise EngineFailure(
            f"asked for the routed experts of {expected} tokens ({context_length} of context and {len(generation.ids)} sampled, without the last "
            f"one, from position {start} on), the engine returned {count}",
            "engine: routed experts differ",
        )


def check_request(ids: Sequence[int], sampling: SamplingParams, context_length: int) -> int:
    """The maximum number of tokens to sample: `max_new_tokens`, or less if the context length leaves less.

    Raises:
        ConfigError: invalid sampling parameters.
        EngineFailure: the context is empty, or as long as the context length.
    """
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1; found {sampling.max_new_tokens}")
    if not 0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"temperature must be a finite number of at least 0; found {sampling.temperature}")
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
