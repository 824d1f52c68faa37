"""The bodies of SGLang's HTTP API, and the properties of a server in which versions of SGLang differ."""

from __future__ import annotations

import functools
import math
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation, SamplingParams
from agentrl.errors import EngineAbort, EngineFailure
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
    deterministic: bool
    context_length: int | None
    """the longest context that leaves space for a token is one shorter"""

    @classmethod
    def read(cls, info: Mapping[str, Any], paths: Mapping[str, Any]) -> ServerFacts:
        """From the response of /server_info and the paths of /openapi.json. Warns if the version is untested."""
        version = str(info.get("version", "unknown"))
        warn_if_untested(version)
        device, tp_size = str(info.get("device") or "cuda"), int(info.get("tp_size") or 1)
        lengths = [int(n) for n in (info.get("context_length"), info.get("max_req_input_len")) if n]
        comparable = "/weights_checker" in paths and tp_size == 1 and not info.get("quantization") and version in TESTED
        return cls(
            version=version,
            device=device,
            tp_size=tp_size,
            brackets="/begin_weight_update" in paths if paths else _at_least(version, (0, 5, 23)),
            checksums=_CHECKSUMS.get(device, "") if comparable else "",
            memory_saver=bool(info.get("enable_memory_saver")),
            deterministic=bool(info.get("enable_deterministic_inference")),
            context_length=min(lengths, default=None),
        )


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


def request_body(ids: list[int], sampling: SamplingParams, max_new_tokens: int, *, seeded: bool) -> dict[str, Any]:
    """The body of /generate: ids in, ids and log-probs out, nothing trimmed."""
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
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": False}


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


def ids_below(ids: list[int], vocab_size: int) -> bool:
    """Whether all ids are in a vocabulary of this size."""
    try:
        return int(np.frombuffer(array("I", ids), np.uint32).max()) < vocab_size
    except (OverflowError, TypeError):  # negative, over 32 bits, or not an integer
        return False


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


def read_version(text: Any, unnamed: int) -> int:
    """Convert a server's weight version to a policy version. `unnamed` is that of initial weights, whose version is not a number."""
    return int(text) if str(text).isdigit() else unnamed


def sampled_tokens(response: Any) -> int:
    """The number of tokens in a response, also of an aborted request."""
    meta = response.get("meta_info", {}) if isinstance(response, dict) else {}
    return max(len(meta.get("output_token_logprobs") or ()), int(meta.get("completion_tokens") or 0))


def read_finish_reason(response: Any, address: str) -> FinishReason:
    """Why the generation ended.

    Raises:
        EngineFailure: the response has no known finish reason.
    """
    meta = response.get("meta_info") if isinstance(response, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in _FINISH_REASONS:
        raise EngineFailure(
            f"{address}/generate answered without a finish reason: {str(response)[:300]}", "engine: no finish reason"
        )
    return _FINISH_REASONS[kind]


def read_generation(response: Mapping[str, Any], unnamed_version: int, address: str) -> Generation:
    """The response of /generate as a Generation. All loops over tokens run in C.

    Raises:
        EngineFailure: ids and log-probs do not belong together, or are not numbers.
        EngineAbort: weights of two versions sampled it.
    """
    meta = response["meta_info"]
    if len(meta.get("weight_versions") or ()) > 1:
        raise EngineAbort("the weights changed while the generation was in flight", "weight update")
    triples = meta.get("output_token_logprobs") or ()
    log_probs, ids = tuple(zip(*triples, strict=True))[:2] if triples else ((), ())
    output_ids = response.get("output_ids")
    if not _INT.issuperset(map(type, ids)):
        raise EngineFailure(f"{address}/generate returned ids that are not integers", "engine: ids not integers")
    if output_ids is not None and tuple(output_ids) != ids:
        raise EngineFailure(
            f"{address}/generate: output_ids ({len(output_ids)}) and the ids of output_token_logprobs ({len(ids)}) differ",
            "engine: ids and log-probs differ",
        )
    if len(_SHARED_INTS) > _MAX_SHARED_INTS:
        _SHARED_INTS.clear()
    ids = tuple(map(_SHARED_INTS.setdefault, ids, ids))
    if not _FLOAT.issuperset(map(type, log_probs)):
        log_probs = tuple([math.nan if p is None else float(p) for p in log_probs])
    if log_probs and not (math.isfinite(sum(log_probs)) and max(log_probs) <= 1e-3):
        raise EngineFailure(
            f"{address}/generate returned log-probs that are not finite or above 0", "engine: log-probs not finite"
        )
    reason = meta["finish_reason"]
    return Generation(
        ids=ids,
        log_probs=log_probs,
        finish_reason=_FINISH_REASONS[reason["type"]],
        matched_stop=reason.get("matched") if reason["type"] == "stop" else None,
        policy_version=read_version(meta.get("weight_version"), unnamed_version),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def must_continue(part: Generation, sampling: SamplingParams) -> bool:
    """Whether the server stopped at the model's end token although the request ignores it, since it has other stop tokens."""
    at_token = part.finish_reason is FinishReason.STOP and isinstance(part.matched_stop, int)
    return sampling.ignore_eos and at_token and part.matched_stop not in sampling.stop_token_ids


def concatenate(parts: list[Generation], context_crc: int | None = None) -> Generation:
    """Generations that continue one another as one. `context_crc`: of the context of the first.

    Raises:
        EngineAbort: weights of different versions sampled them.
    """
    last = parts[-1]
    if len(parts) == 1:
        return replace(last, context_crc=context_crc)
    if len({p.policy_version for p in parts}) > 1:
        raise EngineAbort("the weights changed while the generation was in flight", "weight update")
    return Generation(
        ids=tuple(i for p in parts for i in p.ids),
        log_probs=tuple(x for p in parts for x in p.log_probs),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop if last.finish_reason is FinishReason.STOP else None,
        policy_version=last.policy_version,
        cached_tokens=parts[0].cached_tokens,
        context_crc=context_crc,
    )
