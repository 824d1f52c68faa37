"""The bodies of SGLang's HTTP API, and the properties of a server in which versions of SGLang differ."""

from __future__ import annotations

import base64
import functools
import math
import re
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl.core.message_images import PlacedImage
from agentrl.core.routed_experts import RoutedExperts, RouterShape, joined
from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import MAX_LOG_PROB, Generation, SamplingParams, Speculation
from agentrl.engine.sampling import Decode, StopFinder
from agentrl.errors import ConfigError, EngineFailure
from agentrl.types import FinishReason

TESTED = ("0.5.17", "0.5.23")
"""Tested on GPUs (without brackets around weight updates), and on a CPU."""
LEAST = (0, 5, 10)
"""Older versions lack requests that agentrl sends; pyproject.toml has the same bound."""
_CHECKSUMS = {"cpu": "sha256", "cuda": "mix"}
_INT, _FLOAT = frozenset((int,)), frozenset((float,))
_SHARED_INTS: dict[int, int] = {}
"""One object for each id, however often it is sampled: saves 28 bytes for each token of a kept episode."""
_MAX_SHARED_INTS = 1 << 19
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties of a server."""

    version: str
    device: str
    """cpu or cuda"""
    tp_size: int
    brackets: bool
    """weights by tensors or by a group are sent between /begin_weight_update and /end_weight_update"""
    checksums: str
    """kind of checksum (train/megatron/delivery/server_checksums.py) that /weights_checker returns; empty: none that can be compared"""
    memory_saver: bool
    """memory can be released and resumed"""
    routed_experts: bool
    """the experts of tokens are returned where a request asks for them"""
    lora: bool
    """adapters can be loaded"""
    deterministic: bool
    context_length: int | None
    """the longest context that leaves space for a token is one shorter"""

    @classmethod
    def read(cls, info: Mapping[str, Any], paths: Mapping[str, Any]) -> ServerFacts:
        """From the response of /server_info and the paths of /openapi.json.

        Raises:
            ValueError: a property has another type than SGLang's.
        """
        given: dict[str, Any] = {
            "version": "unknown",
            "device": "cuda",
            "tp_size": 1,
            "context_length": 0,
            "max_req_input_len": 0,
        }
        given |= {name: info[name] for name in given if info.get(name) is not None}
        version, device, tp_size, *counts = given.values()
        if not all(type(text) is str for text in (version, device)):
            raise ValueError(f"version {version!r:.60}, device {device!r:.60}; expected texts")
        if not all(type(n) is int and n >= 0 for n in (tp_size, *counts)):
            raise ValueError(
                f"tp_size {tp_size!r:.60}, context_length and max_req_input_len {counts!r:.60}; expected counts"
            )
        lengths = [n for n in counts if n]
        divided = [info.get(name) for name in ("dp_size", "pp_size", "ep_size")]
        whole = all(size in (None, 1) for size in divided) and not info.get("quantization")
        comparable = "/weights_checker" in paths and whole and version in TESTED
        return cls(
            version=version,
            device=device,
            tp_size=tp_size,
            brackets="/begin_weight_update" in paths if paths else _at_least(version, (0, 5, 23)),
            checksums=_CHECKSUMS.get(device, "") if comparable else "",
            memory_saver=bool(info.get("enable_memory_saver")),
            routed_experts=bool(info.get("enable_return_routed_experts")),
            lora=bool(info.get("enable_lora")),
            deterministic=bool(info.get("enable_deterministic_inference")),
            context_length=min(lengths, default=None),
        )


def check_version(version: str, whose: str, advice: str) -> None:
    """Refuse a version that is too old; warn about one that was not tested. Development builds have other names, which are accepted.

    Raises:
        ConfigError: it is too old.
    """
    released = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", version)
    if released and tuple(map(int, released.groups()[:3])) < LEAST:
        raise ConfigError(f"{whose} has SGLang {version}, agentrl needs {'.'.join(map(str, LEAST))} or later: {advice}")
    warn_if_untested(version)


@functools.cache
def warn_if_untested(version: str) -> None:
    """Warn once for each version."""
    if version not in TESTED:
        warnings.warn(
            f"SGLang {version} was not tested with agentrl; tested: {', '.join(TESTED)}", RuntimeWarning, stacklevel=2
        )


def _at_least(version: str, minimum: tuple[int, ...]) -> bool:
    parts = version.split(".")[:3]
    return all(p.isdigit() for p in parts) and tuple(map(int, parts)) >= minimum


# -- requests ----------------------------------------------------------------------------------------------------------


def request_body(
    ids: list[int], sampling: SamplingParams, max_new_tokens: int, *, seeded: bool, experts_from: int | None = None
) -> dict[str, Any]:
    """The body of /generate: ids in, ids and log-probs out, nothing trimmed. `experts_from`: the first token whose experts are returned."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # SGLang would ignore stop_token_ids too: see `must_continue`
        "ignore_eos": sampling.ignore_eos and not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if seeded:
        params["sampling_seed"] = sampling.seed & 0x7FFFFFFF
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": False}
    if experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
    return body


def add_images(body: dict[str, Any], images: Sequence[PlacedImage]) -> dict[str, Any]:
    """The body with images. Each has one placeholder, which SGLang expands; the response must return the resulting prompt ids.

    SGLang keeps the other ids (`SGLANG_MM_AVOID_RETOKENIZE`, the default since 0.5.17); `check_prompt` verifies it.
    """
    ids, at, kept = body["input_ids"], 0, []
    for placed in images:
        kept += ids[at : placed.at + 1]
        at = placed.at + placed.tokens
    urls = [placed.image.url for placed in images]
    return {**body, "input_ids": [*kept, *ids[at:]], "image_data": urls, "return_prompt_token_ids": True}


def ids_below(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all ids are in a vocabulary of this size."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError):  # negative, over 32 bits, or not an integer
        return False
    return _below(packed, vocab_size)


def context_checksum(ids: Sequence[int], vocab_size: int | None) -> int:
    """`ids_checksum` of a context. `vocab_size`: None if unknown.

    Raises:
        EngineFailure: an id is outside the vocabulary.
    """
    packed: array[int] | None
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError):
        packed = None
    if packed is None or not (vocab_size is None or _below(packed, vocab_size)):
        bound = "non-negative 32-bit integers" if vocab_size is None else f"0..{vocab_size - 1}"
        raise EngineFailure(
            f"the context has ids outside {bound}; is its tokenizer the model's?", "ids outside the vocabulary"
        )
    return ids_checksum(packed)


def _below(packed: array[int], vocab_size: int) -> bool:
    if not packed:
        return True
    ids = np.frombuffer(packed, np.uint32)
    return int(ids[ids.argmax()]) < vocab_size  # `max` has a wrapper in Python


# -- responses ---------------------------------------------------------------------------------------------------------


def check_prompt(response: Mapping[str, Any], ids: list[int], address: str, *, images: bool) -> None:
    """The server used exactly these ids as its prompt. It returns the ids themselves only for contexts with images, else their number.

    Raises:
        EngineFailure: it used others.
    """
    prompt_ids, length = response.get("prompt_token_ids"), response["meta_info"].get("prompt_tokens")
    if length == len(ids) and (prompt_ids is None or prompt_ids == ids):
        return
    if prompt_ids is None and not images:
        raise EngineFailure(
            f"{address}/generate read {length} context tokens, but was sent {len(ids)}", "engine: context differs"
        )
    count = len(prompt_ids) if isinstance(prompt_ids, list) else length
    raise EngineFailure(
        f"{address}/generate read {count} tokens with images, the renderer gave {len(ids)}, or the ids differ: "
        "the server's image processor is configured differently from the model folder's, or it tokenised the text again",
        "engine: image expansion differs",
    )


def malformed(where: str, found: object) -> EngineFailure:
    """The failure for an answer that has another shape than SGLang's. `where`: address and path."""
    return EngineFailure(f"{where} gave a malformed answer: {found}", "engine: malformed answer")


def read_version(text: Any, unnamed: int) -> int:
    """Convert a server's weight version to a policy version. `unnamed` is that of initial weights, whose version is not a number."""
    return int(text) if str(text).isascii() and str(text).isdigit() else unnamed


def sampled_tokens(response: Any, address: str) -> int:
    """The number of tokens in a response, also of an aborted request.

    Raises:
        EngineFailure: the response does not report it.
    """
    meta = response["meta_info"]
    triples, count = meta.get("output_token_logprobs") or [], meta.get("completion_tokens", 0)
    if not isinstance(triples, list) or type(count) is not int:
        raise malformed(f"{address}/generate", f"completion_tokens {count!r:.60}")
    return max(len(triples), count)


def read_finish_reason(response: Any, address: str) -> FinishReason:
    """Why the generation ended.

    Raises:
        EngineFailure: the response has no known finish reason.
    """
    meta = response.get("meta_info") if isinstance(response, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(kind, str) or kind not in _FINISH_REASONS:
        raise EngineFailure(
            f"{address}/generate answered without a finish reason: {str(response)[:300]}", "engine: no finish reason"
        )
    return _FINISH_REASONS[kind]


def read_generation(
    response: Mapping[str, Any],
    unnamed_version: int,
    address: str,
    vocab_size: int | None = None,
    *,
    context_crc: int | None = None,
) -> Generation:
    """The response of /generate as a Generation. All loops over tokens run in C.

    Args:
        response: The JSON object.
        unnamed_version: The policy version of weights whose version is not a number.
        address: The server, for errors.
        vocab_size: None if unknown.
        context_crc: The checksum of the ids that were sent.

    Raises:
        EngineFailure: the response is malformed; ids and log-probs do not belong together, are not numbers, or are outside their range.
    """
    meta, where = response["meta_info"], f"{address}/generate"
    reason, cached = meta["finish_reason"], meta.get("cached_tokens") or 0
    version = meta.get("weight_version")
    matched = reason.get("matched") if reason["type"] == "stop" else None
    if type(version) not in (str, int):
        raise malformed(where, f"weight_version {version!r:.60}")
    versions = _read_versions(meta, unnamed_version, where)
    if type(cached) is not int or not (matched is None or type(matched) in (str, int)):
        raise malformed(where, f"cached_tokens {cached!r:.60}, matched {matched!r:.60}")
    ids, log_probs = _read_tokens(response, where)
    if ids and not 0 <= min(ids) <= max(ids) < (1 << 31 if vocab_size is None else vocab_size):
        bound = "non-negative 32-bit integers" if vocab_size is None else f"0..{vocab_size - 1}"
        raise EngineFailure(
            f"{where} sampled the ids {min(ids)} to {max(ids)}, expected {bound}; is the server's model the trained one?",
            "engine: ids outside the vocabulary",
        )
    if len(_SHARED_INTS) > _MAX_SHARED_INTS:
        _SHARED_INTS.clear()
    return Generation(
        ids=tuple(map(_SHARED_INTS.setdefault, ids, ids)),
        log_probs=log_probs,
        finish_reason=_FINISH_REASONS[reason["type"]],
        matched_stop=matched,
        policy_version=read_version(version, unnamed_version),
        cached_tokens=cached,
        speculation=_read_speculation(meta, where),
        context_crc=context_crc,
        versions=versions if len(versions) > 1 else (),
    )


def _read_speculation(meta: Mapping[str, Any], where: str) -> Speculation | None:
    """The counts of speculative decoding; None if the server did not speculate. Older versions use other names."""
    if not (steps := meta.get("spec_verify_ct")):
        return None
    accepted = meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num", 0))
    proposed = meta.get("spec_num_proposed_drafts", meta.get("spec_draft_token_num", 0))
    if any(type(count) is not int or count < 0 for count in (steps, accepted, proposed)):
        raise malformed(where, f"spec_verify_ct {steps!r:.60}, {accepted!r:.60} of {proposed!r:.60} drafts accepted")
    return Speculation(steps, accepted, proposed)


def _read_versions(meta: Mapping[str, Any], unnamed: int, where: str) -> tuple[tuple[int, int], ...]:
    """(version, tokens) of each span of `weight_versions`, which SGLang reports since 0.5.23; empty if it reports none."""
    spans = meta.get("weight_versions") or []
    try:
        return tuple(
            (read_version(span["version"], unnamed), int(span["end"]) - int(span["start"]))
            for span in spans
            if span["end"] > span["start"]
        )
    except (TypeError, KeyError, ValueError, OverflowError) as e:
        raise malformed(where, f"weight_versions {spans!r:.60}") from e


def _read_tokens(response: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Sampled ids and their log-probs."""
    meta = response["meta_info"]
    triples, count = meta.get("output_token_logprobs") or [], meta.get("completion_tokens")
    output_ids = response.get("output_ids")
    if not (output_ids is None or isinstance(output_ids, list)) or not isinstance(triples, list):
        raise malformed(where, "output_ids or output_token_logprobs is not a list")
    try:
        log_probs, ids = tuple([t[0] for t in triples]), tuple([t[1] for t in triples])
    except (TypeError, LookupError) as e:
        raise malformed(where, "output_token_logprobs does not consist of (log-prob, id, text)") from e
    if not _INT.issuperset(map(type, ids)):
        raise EngineFailure(f"{where} returned ids that are not integers", "engine: ids not integers")
    if output_ids is not None and tuple(output_ids) != ids:
        raise EngineFailure(
            f"{where}: output_ids ({len(output_ids)}) and the ids of output_token_logprobs ({len(ids)}) differ",
            "engine: ids and log-probs differ",
        )
    if type(count) is not int or count != len(ids):
        raise EngineFailure(
            f"{where} returned {len(ids)} ids with log-probs, completion_tokens is {count!r:.60}",
            "engine: completion_tokens differ",
        )
    if not _FLOAT.issuperset(map(type, log_probs)):
        log_probs = tuple([float(p) if type(p) in (int, float) else math.nan for p in log_probs])
    if log_probs and not (math.isfinite(sum(log_probs)) and max(log_probs) <= MAX_LOG_PROB):
        raise EngineFailure(
            f"{where} returned log-probs that are not finite or above 0", "engine: log-probs not finite"
        )
    return ids, log_probs


def read_experts(response: Mapping[str, Any], router: RouterShape, tokens: int, address: str) -> RoutedExperts | None:
    """The experts of `tokens` tokens; None: the response has none.

    Raises:
        EngineFailure: they are of other tokens, or not those of this model.
    """
    where, encoded = f"{address}/generate", response["meta_info"].get("routed_experts")
    if encoded is None:
        return None
    try:
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    except (TypeError, ValueError) as e:
        raise malformed(where, f"routed_experts {encoded!r:.60}") from e
    each = router.layers * router.topk
    if len(numbers) != tokens * each:
        raise EngineFailure(
            f"{where} returned {len(numbers)} routed experts, expected {tokens} tokens × {router.layers} layers × {router.topk}; "
            "is the server's model the trained one?",
            "engine: routed experts differ",
        )
    experts = numbers.reshape(tokens, router.layers, router.topk).copy()
    dense = [layer for layer in range(router.layers) if layer not in router.mixtures]
    experts[:, dense] = 0  # what the server's buffer held before
    if fault := router.fault(experts):
        raise EngineFailure(f"{where} returned routed experts that are wrong: {fault}", "engine: routed experts differ")
    return RoutedExperts.of(experts)


def must_continue(part: Generation, sampling: SamplingParams) -> bool:
    """Whether the server stopped at the model's end token although the request ignores it, since it has other stop tokens."""
    at_token = part.finish_reason is FinishReason.STOP and isinstance(part.matched_stop, int)
    return sampling.ignore_eos and at_token and part.matched_stop not in sampling.stop_token_ids


def concatenate(parts: list[Generation]) -> Generation:
    """Generations that continue one another as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    versions: list[tuple[int, int]] = []
    told = [part.speculation for part in parts if part.speculation is not None]
    for part in parts:
        for version, count in part.versions or ((part.policy_version, len(part.ids)),):
            if versions and versions[-1][0] == version:
                count += versions.pop()[1]
            if count:
                versions.append((version, count))
    return Generation(
        ids=tuple(i for p in parts for i in p.ids),
        log_probs=tuple(x for p in parts for x in p.log_probs),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop if last.finish_reason is FinishReason.STOP else None,
        policy_version=last.policy_version,
        cached_tokens=parts[0].cached_tokens,
        speculation=Speculation(*map(sum, zip(*told, strict=True))) if told else None,
        routed_experts=joined([p.routed_experts for p in parts if p.routed_experts is not None]),
        context_crc=parts[0].context_crc,
        versions=tuple(versions) if len(versions) > 1 else (),
    )


def end_at_stop(parts: Sequence[Generation], part: Generation, stop: Sequence[str], decode: Decode) -> Generation:
    """The part that continues `parts`, ended after the token that completes a stop string.

    A server finds stop strings only inside the part that it samples. One that begins in an earlier part is found here. What the server sampled
    after it is removed: a server that had not been interrupted would have stopped there.
    """
    ids = [i for earlier in parts for i in earlier.ids]
    finder, experts = StopFinder(stop, decode), part.routed_experts
    for count, token in enumerate(part.ids, 1):
        ids.append(token)
        matched = finder.find(ids)
        if matched is not None:
            return replace(
                part,
                ids=part.ids[:count],
                log_probs=part.log_probs[:count],
                finish_reason=FinishReason.STOP,
                matched_stop=matched,
                versions=_first_tokens(part.versions, count),
                routed_experts=experts and experts[: experts.tokens - (len(part.ids) - count)],
            )
    return part


def _first_tokens(versions: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """The runs of the first `count` tokens."""
    runs: list[tuple[int, int]] = []
    for version, tokens in versions:
        tokens = min(tokens, count)
        count -= tokens
        if tokens:
            runs.append((version, tokens))
    return tuple(runs)
