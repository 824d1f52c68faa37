"""What differs between versions of SGLang, told from the server itself, and how its answers read."""

from __future__ import annotations

import functools
import math
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.core.message_images import PlacedImage
from agentrl.engine.base import Generation, SamplingParams
from agentrl.errors import EngineAbort, EngineFailure
from agentrl.types import FinishReason

TESTED = ("0.5.17", "0.5.23")
"""on GPUs (there are no brackets around weight updates), and on a CPU"""
LEAST = (0, 5, 10)
"""older ones lack what agentrl asks for; as in pyproject.toml"""
_CHECKSUMS = {"cpu": "sha256", "cuda": "mix"}
_INTS, _FLOATS = frozenset((int,)), frozenset((float,))
_SHARED: dict[int, int] = {}
"""one object for each id, however often it is sampled: 28 bytes less for each token of an episode that is kept"""
_MOST_SHARED = 1 << 19
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    device: str
    """cpu, cuda"""
    tp_size: int
    brackets: bool
    """weights over tensors or a group stand between /begin_weight_update and /end_weight_update"""
    checksums: str
    """the kind of checksum (train/megatron/delivery/fused_checksum.py) that /weights_checker gives of every parameter; empty: none"""
    memory_saver: bool
    """memory can be released and resumed"""
    deterministic: bool
    context_length: int | None
    """the longest context that leaves room for a token is one shorter"""

    @classmethod
    def read(cls, info: Mapping[str, Any], paths: Mapping[str, Any]) -> ServerFacts:
        """From /server_info and the paths of /openapi.json; warns of an untested version."""
        version = str(info.get("version", "unknown"))
        warn_if_untested(version)
        device, tp = str(info.get("device") or "cuda"), int(info.get("tp_size") or 1)
        lengths = [int(n) for n in (info.get("context_length"), info.get("max_req_input_len")) if n]
        return cls(
            version=version,
            device=device,
            tp_size=tp,
            brackets="/begin_weight_update" in paths if paths else _at_least(version, (0, 5, 23)),
            checksums=_CHECKSUMS.get(device, "")
            if "/weights_checker" in paths and tp == 1 and not info.get("quantization") and version in TESTED
            else "",
            memory_saver=bool(info.get("enable_memory_saver")),
            deterministic=bool(info.get("enable_deterministic_inference")),
            context_length=min(lengths, default=None),
        )


@functools.cache
def warn_if_untested(version: str) -> None:
    """Once for each version."""
    if version not in TESTED:
        warnings.warn(
            f"SGLang {version} was not tested with agentrl; tested: {', '.join(TESTED)}", RuntimeWarning, stacklevel=2
        )


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    parts = version.split(".")[:3]
    return all(p.isdigit() for p in parts) and tuple(map(int, parts)) >= least


def request_body(ids: list[int], sampling: SamplingParams, room: int, rid: str, *, seeded: bool) -> dict[str, Any]:
    """The body of /generate: ids in, ids and log-probs out, nothing trimmed."""
    params: dict[str, Any] = {
        "max_new_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos
        and not sampling.stop_token_ids,  # else SGLang ignores those too: see `goes_on`
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
    return {"rid": rid, "input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": False}


def with_images(body: dict[str, Any], images: Sequence[PlacedImage]) -> dict[str, Any]:
    """The body of a request with images: one placeholder each, which SGLang expands itself, and the wish to hear what that gave.

    The other ids it leaves as they are (`SGLANG_MM_AVOID_RETOKENIZE`, on by default since 0.5.17; `check_prompt` would show if not).
    """
    ids, at, kept = body["input_ids"], 0, []
    for placed in images:
        kept += ids[at : placed.at + 1]
        at = placed.at + placed.tokens
    urls = [placed.image.url for placed in images]
    return {**body, "input_ids": [*kept, *ids[at:]], "image_data": urls, "return_prompt_token_ids": True}


def check_prompt(answer: Mapping[str, Any], ids: Sequence[int], address: str) -> None:
    """The server read exactly these ids.

    Raises:
        EngineFailure: it read others.
    """
    told, count = answer.get("prompt_token_ids"), answer["meta_info"].get("prompt_tokens")
    if told is not None and list(told) == list(ids):
        return
    if told is not None or count != len(ids):
        raise EngineFailure(
            f"{address}/generate read {len(told) if told is not None else count} tokens with images, the renderer gave {len(ids)}, or others: "
            "its image processor is set otherwise than the model folder's, or it tokenised anew",
            "engine: images expanded otherwise",
        )


def within(ids: list[int], size: int) -> bool:
    """All ids are those of a vocabulary of `size`."""
    try:
        return int(np.frombuffer(array("I", ids), np.uint32).max()) < size
    except (OverflowError, TypeError):  # negative, over 32 bits, no integer
        return False


def read_version(text: Any, unnamed: int) -> int:
    """A weight version as a policy version; SGLang's 'default' stands for the weights that the server started with."""
    return int(text) if str(text).isdigit() else unnamed


def sampled_tokens(answer: Any) -> int:
    """How many tokens an answer (also of an aborted request) holds."""
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    return max(len(meta.get("output_token_logprobs") or ()), int(meta.get("completion_tokens") or 0))


def finish_reason(answer: Any, address: str) -> FinishReason:
    """Why an answer ended.

    Raises:
        EngineFailure: it does not say, or is no answer.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in _REASONS:
        raise EngineFailure(
            f"{address}/generate answered without a finish reason: {str(answer)[:300]}", "engine: no finish reason"
        )
    return _REASONS[kind]


def read_generation(answer: Mapping[str, Any], unnamed_version: int, address: str) -> Generation:
    """The answer of /generate as a Generation.

    Raises:
        EngineFailure: ids and log-probs do not belong together, or are no numbers.
        EngineAbort: two versions of the weights sampled it.
    """
    meta = answer["meta_info"]
    spans = meta.get("weight_versions") or ()
    if len(spans) > 1:
        raise EngineAbort("the weights changed while the generation was in flight", "weight update")
    triples = meta.get("output_token_logprobs") or ()
    log_probs, ids = tuple(zip(*triples, strict=True))[:2] if triples else ((), ())  # all loops over tokens are in C
    said = answer.get("output_ids")
    if not _INTS.issuperset(map(type, ids)):
        raise EngineFailure(f"{address}/generate sent ids that are no integers", "engine: ids are no integers")
    if said is not None and tuple(said) != ids:
        raise EngineFailure(
            f"{address}/generate: output_ids ({len(said)}) and the ids of output_token_logprobs ({len(ids)}) differ",
            "engine: ids and log-probs differ",
        )
    if len(_SHARED) > _MOST_SHARED:
        _SHARED.clear()
    ids = tuple(map(_SHARED.setdefault, ids, ids))
    if not _FLOATS.issuperset(map(type, log_probs)):
        log_probs = tuple([math.nan if p is None else float(p) for p in log_probs])
    if log_probs and not (math.isfinite(sum(log_probs)) and max(log_probs) <= 1e-3):
        raise EngineFailure(
            f"{address}/generate sent log-probs that are not numbers up to 0", "engine: log-probs not finite"
        )
    reason = meta["finish_reason"]
    return Generation(
        ids=ids,
        log_probs=log_probs,
        finish_reason=_REASONS[reason["type"]],
        matched_stop=reason.get("matched") if reason["type"] == "stop" else None,
        policy_version=read_version(meta.get("weight_version"), unnamed_version),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def goes_on(part: Generation, sampling: SamplingParams) -> bool:
    """The server stopped at the model's end token, which was to be ignored while other stop tokens count: it is asked to continue."""
    at_end = part.finish_reason is FinishReason.STOP and isinstance(part.matched_stop, int)
    return sampling.ignore_eos and at_end and part.matched_stop not in sampling.stop_token_ids


def join(parts: list[Generation]) -> Generation:
    """Generations that continue one another as one.

    Raises:
        EngineAbort: by weights of different versions.
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    if len({p.policy_version for p in parts}) > 1:
        raise EngineAbort("the weights changed while the generation was in flight", "weight update")
    ids = tuple(i for p in parts for i in p.ids)
    log_probs = tuple(x for p in parts for x in p.log_probs)
    at_end = last.matched_stop if last.finish_reason is FinishReason.STOP else None
    return Generation(ids, log_probs, last.finish_reason, at_end, last.policy_version, parts[0].cached_tokens)
