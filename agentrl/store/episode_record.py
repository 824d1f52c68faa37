"""The record format: an episode or an optimizer step as one line of versioned JSON. This module does no file I/O.

Version 1 held episodes only. Version 2 adds `kind` ('episode' or 'step') and a record of every optimizer step.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.message_images import Image, PlacedImage, is_image
from agentrl.core.routed_experts import RoutedExperts
from agentrl.core.sequences import ids_checksum
from agentrl.core.summary_request import SummaryRequest
from agentrl.errors import StoreError
from agentrl.store.blobs import EXPERTS, IMAGES, experts_file, is_hash
from agentrl.store.json_values import plain
from agentrl.types import (
    Action,
    FinishReason,
    Message,
    Observation,
    ParseError,
    Provenance,
    Segment,
    Span,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

VERSION = 2
"""Version of the record format. Readers accept this version and older ones."""


def _field_reader(cls: type) -> Callable[[Any], dict[str, Any]]:
    """Return a function that lists an instance's fields. `asdict` copies what users put into `info`, and cannot copy every value."""
    names = tuple(f.name for f in fields(cls))
    values = attrgetter(*names)
    return lambda instance: dict(zip(names, values(instance), strict=True))


_turn_fields, _action_fields, _task_fields = map(_field_reader, (Turn, Action, Task))
_call_fields, _result_fields, _summary_fields = map(_field_reader, (ToolCall, ToolResult, SummaryRequest))
_TRAJECTORY_FIELDS = tuple(f.name for f in fields(Trajectory))
_OPTIONAL = ("detail", "parent", "branch_turn", "roles", "role", "judgements")
"""Fields of a trajectory that its record lacks where they hold the default."""
_PROPERTY_AFTER = {"stop_reason": "status", "weights": "score"}
"""Properties of a trajectory that its record holds, by the field that they follow."""
_EPISODE_KEYS = tuple(key for name in _TRAJECTORY_FIELDS for key in (name, _PROPERTY_AFTER.get(name)) if key)
_episode_values = attrgetter(*_EPISODE_KEYS)
_PROVENANCES = tuple(p.name for p in sorted(Provenance))
"""Provenance names by value: `Enum.name` is several times slower, and every span needs one."""
_JSON_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


# -- JSON lines --------------------------------------------------------------------------------------------------------


def encode(record: Mapping[str, Any] | list[Any]) -> bytes:
    """Return a record as a line of JSON. Values that JSON cannot express (in a user's info or state) are written as their repr.

    A value that has no repr either costs itself, never the record (see json_values.py).
    """
    try:
        return orjson.dumps(record, json_default, _JSON_OPTIONS)
    except TypeError:  # integers over 64 bits, lone surrogates, deep nesting: a policy can write them all
        return _encode_any(record).encode() + b"\n"


def _encode_any(record: Mapping[str, Any] | list[Any]) -> str:
    try:
        return json.dumps(record, default=json_default, allow_nan=False)
    except Exception:  # noqa: BLE001  NaN, tuples as keys, cycles, and whatever the repr of a user's value raises
        return json.dumps(plain(record, json_default), allow_nan=False)


def json_default(value: Any) -> Any:
    """What orjson and json write for a value that they do not know."""
    if isinstance(value, Image):
        return {"sha256": value.sha256}
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):  # orjson serializes dataclasses itself
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def decode(line: bytes, where: object) -> dict[str, Any]:
    """Return the record in a line. `where` names the line's place in errors.

    Raises:
        StoreError: the line is not a record, or its version is newer.
    """
    try:
        record: dict[str, Any] = json.loads(line)  # orjson rounds large integers and refuses lone surrogates
        version = int(record["version"])
    except (ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{where}: not an episode record: {_reason(e)}. Was the file written by agentrl?") from e
    if version > VERSION:
        raise StoreError(
            f"{where}: written by a newer agentrl (record version {version}, this one reads up to {VERSION}); update agentrl"
        )
    return record


def unreadable(record: Mapping[str, Any], error: Exception) -> StoreError:
    """Return the error for a record with missing or wrong fields."""
    return StoreError(f"episode {record.get('episode_id', '?')}: the record cannot be read: {_reason(error)}")


def _reason(error: Exception) -> str:
    return f"missing key {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def is_episode(record: Mapping[str, Any]) -> bool:
    """True for an episode, False for an optimizer step."""
    return bool(record.get("kind", "episode") == "episode")


def extra_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that were stored beside the trajectory."""
    return {k: v for k, v in record.items() if k not in ("version", "kind", *_EPISODE_KEYS)}


# -- trajectory to record ----------------------------------------------------------------------------------------------


def to_record(t: Trajectory, *, whole: bool = False, **extra: Any) -> dict[str, Any]:
    """Return a trajectory as JSON values. `extra` (step, split, config fingerprint, …) is stored beside it.

    `whole`: routed experts are in the record itself, not in a file that it names.
    """
    values = dict(zip(_EPISODE_KEYS, _episode_values(t), strict=True))
    values |= {
        "task": {**_task_fields(t.task), "metadata": dict(t.task.metadata)},
        "segments": [_segment(s, whole=whole) for s in t.segments],
        "turns": [_turn(turn) for turn in t.turns],
        "stop_reason": t.stop_reason.value,
        "status": t.status.value,
        **{key: dict(values[key]) for key in ("state", "rewards", "weights", "timings")},
    }
    if not t.detail:
        del values["detail"]
    if t.parent is None:
        del values["parent"], values["branch_turn"]
    for name in ("roles", "role", "judgements"):
        if not values[name]:
            del values[name]
    return {"version": VERSION, "kind": "episode", **extra, **values}


def _turn(t: Turn) -> dict[str, Any]:
    record = _turn_fields(t)
    record["action"] = action = _action_fields(t.action)  # orjson serializes its errors
    action["calls"] = [*map(_call_fields, t.action.calls)]  # orjson too could, in five times the time
    action["results"] = [*map(_result_fields, t.action.results)]
    record["observation"] = {"messages": t.observation.messages}
    if t.observation.to:
        record["observation"]["to"] = t.observation.to
    if t.context is None:
        del record["context"]
    if not t.rewards:
        del record["rewards"]
    if t.summary is None:
        del record["summary"]
    else:
        record["summary"] = _summary_fields(t.summary)
    return record


def _segment(s: Segment, *, whole: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"agent_id": s.agent_id, "spans": [_span(span) for span in s.spans]}
    if s.images:
        record["images"] = [{"sha256": p.image.sha256, "at": p.at, "tokens": p.tokens} for p in s.images]
    if (experts := s.routed_experts) is not None:
        content = {"base64": base64.b64encode(experts.content).decode()} if whole else {"sha256": experts.sha256}
        record["routed_experts"] = {"shape": experts.shape, "dtype": experts.dtype, **content}
    return record


def _span(s: Span) -> dict[str, Any]:
    record: dict[str, Any] = {"provenance": _PROVENANCES[s.provenance], "turn": s.turn, "ids": s.ids}
    if s.log_probs is not None:
        record |= {"log_probs": s.log_probs, "policy_version": s.policy_version, "temperature": s.temperature}
    return record


# -- record to trajectory ----------------------------------------------------------------------------------------------


def from_record(record: Mapping[str, Any], blobs: Path | None = None) -> Trajectory:
    """Return the trajectory of a record. `blobs` is the folder of the files that it refers to.

    Raises:
        StoreError: fields are missing or of the wrong type.
    """
    images = blobs and blobs / IMAGES
    try:
        values = {name: record[name] for name in _TRAJECTORY_FIELDS if name not in _OPTIONAL}
        task, prompt = record["task"], record["task"]["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(read_images(prompt, images))
        values |= {
            "task": Task(task["id"], prompt, task["label"], task["metadata"]),
            "segments": tuple(_read_segment(s, blobs) for s in record["segments"]),
            "turns": tuple(_read_turn(t, images) for t in record["turns"]),
            "stop_reason": StopReason(record["stop_reason"]),
            **{name: record[name] for name in _OPTIONAL if name in record},
            "roles": tuple(record.get("roles", ())),
        }
        return Trajectory(**values)
    except (KeyError, TypeError, ValueError) as e:
        raise unreadable(record, e) from e


def _read_turn(t: Mapping[str, Any], images: Path | None) -> Turn:
    a = t["action"]
    action = Action(
        text=a["text"],
        calls=tuple(ToolCall(**c) for c in a["calls"]),
        errors=tuple(ParseError(**e) for e in a["errors"]),
        finish_reason=FinishReason(a["finish_reason"]),
        answer=a["answer"],
        results=tuple(_read_result(r, images) for r in a["results"]),
    )
    seen = t["observation"]
    observation = Observation(tuple(read_images(seen["messages"], images)), seen.get("to", ""))
    context = tuple(read_images(t["context"], images)) if t.get("context") else None
    summary = SummaryRequest(**t["summary"]) if t.get("summary") else None
    return Turn(**{**t, "action": action, "observation": observation, "context": context, "summary": summary})


def _read_result(r: Mapping[str, Any], images: Path | None) -> ToolResult:
    parts = r.get("parts")
    return ToolResult(**{**r, "parts": tuple(_read_parts(parts, images))} if parts else r)


def _read_segment(s: Mapping[str, Any], blobs: Path | None) -> Segment:
    images = blobs and blobs / IMAGES
    placed = tuple(PlacedImage(_image(p["sha256"], images), p["at"], p["tokens"]) for p in s.get("images", ()))
    experts = s.get("routed_experts")
    return Segment(tuple(map(_read_span, s["spans"])), s["agent_id"], placed, experts and _experts(experts, blobs))


def _experts(record: Mapping[str, Any], blobs: Path | None) -> RoutedExperts:
    tokens, layers, topk = map(int, record["shape"])
    if record["dtype"] not in ("|u1", "<u2"):
        raise ValueError(f"routed experts cannot have the dtype {record['dtype']!r:.60}")
    if "base64" in record:
        return RoutedExperts((tokens, layers, topk), record["dtype"], base64.b64decode(record["base64"], validate=True))
    sha256 = _hash(record["sha256"], "routed experts")
    file = blobs and experts_file(blobs / EXPERTS, sha256)
    return RoutedExperts((tokens, layers, topk), record["dtype"], file, sha256)


def _read_span(s: Mapping[str, Any]) -> Span:
    log_probs = s.get("log_probs")
    return Span(
        Provenance[s["provenance"]],
        tuple(s["ids"]),
        s["turn"],
        None if log_probs is None else tuple(log_probs),
        s.get("policy_version"),
        s.get("temperature", 1.0),
    )


def read_images(messages: Iterable[Message], images: Path | None) -> list[Message]:
    """Return recorded messages with their images, which the record names by hash."""
    return [
        {**m, "content": _read_parts(m["content"], images)} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def _read_parts(parts: Iterable[Any], images: Path | None) -> list[Any]:
    return [
        {**p, "image": _image(p["image"]["sha256"], images)} if is_image(p) and "sha256" in p["image"] else p
        for p in parts
    ]


def _image(sha256: str, images: Path | None) -> Image:
    _hash(sha256, "an image")
    return Image(sha256, images / f"{sha256}.png" if images else None)


def _hash(sha256: str, of: str) -> str:
    if not is_hash(sha256):  # as a file name it could lead out of the folder
        raise ValueError(f"{sha256!r:.80} is not the hash of {of}")
    return sha256


# -- tokens ------------------------------------------------------------------------------------------------------------


def token_columns(
    segment: Mapping[str, Any], trained: Iterable[str] = ("SAMPLED",), branch_turn: int = 0
) -> dict[str, list[Any]]:
    """Return the tokens of a recorded segment, one list per property. `trained` names the provenances with mask 1, from `branch_turn` on."""
    spans = segment["spans"]

    def per_token(value: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        return [v for span in spans for v in [value(span)] * len(span["ids"])]

    return {
        "ids": [i for span in spans for i in span["ids"]],
        "provenance": per_token(lambda span: int(Provenance[span["provenance"]])),
        "turn": per_token(lambda span: span["turn"]),
        "mask": per_token(lambda span: int(span["provenance"] in trained and span["turn"] >= branch_turn)),
        "log_prob": [v for span in spans for v in (span.get("log_probs") or [None] * len(span["ids"]))],
        "version": per_token(lambda span: span.get("policy_version")),
        "temperature": per_token(lambda span: span.get("temperature")),
    }


def exactness_violations(trajectories: Iterable[Trajectory]) -> int:
    """Count the turns whose recorded context tokens do not have the checksum of the tokens that left for the engine."""
    violations = 0
    for t in trajectories:
        ids = [s.ids for s in t.segments]
        violations += sum(
            ids_checksum(ids[turn.segment][: turn.context_length]) != turn.context_crc
            for turn in t.turns
            if turn.segment >= 0
        )
    return violations
