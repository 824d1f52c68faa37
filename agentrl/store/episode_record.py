"""One record: what is kept of an episode, and of an optimizer step, as one line of versioned JSON. No files here.

Version 1 held episodes only. Version 2 says `kind` ('episode' or 'step') and keeps, of every optimizer step, what the trainer was fed.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.message_images import Image, Placed, is_image
from agentrl.errors import StoreError
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
"""of the record's layout; readers accept this and older ones"""
_PROVENANCES = tuple(p.name for p in sorted(Provenance))
"""names by value: an enum's own `name` takes several times as long, and there is one for each span"""
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_OWN = (
    *(
        "version",
        "kind",
        "episode_id",
        "group_index",
        "index",
        "attempt",
        "task",
        "env",
        "segments",
        "turns",
        "stop_reason",
    ),
    *("status", "cause", "state", "rewards", "weights", "score", "seed", "demonstration", "timings", "detail"),
)


def to_record(t: Trajectory, **extra: Any) -> dict[str, Any]:
    """A trajectory as JSON values; `extra` (step, split, config fingerprint, …) is kept beside it."""
    return {
        "version": VERSION,
        "kind": "episode",
        **extra,
        "episode_id": t.episode_id,
        "group_index": t.group_index,
        "index": t.index,
        "attempt": t.attempt,
        "task": {"id": t.task.id, "prompt": t.task.prompt, "label": t.task.label, "metadata": dict(t.task.metadata)},
        "env": t.env,
        "segments": [_segment(s) for s in t.segments],
        "turns": [_turn(turn) for turn in t.turns],
        "stop_reason": t.stop_reason.value,
        "status": t.status.value,
        "cause": t.cause,
        "state": dict(t.state),
        "rewards": dict(t.rewards),
        "weights": dict(t.weights),
        "score": t.score,
        "seed": t.seed,
        "demonstration": t.demonstration,
        "timings": dict(t.timings),
        **({"detail": t.detail} if t.detail else {}),
    }


def step_record(**values: Any) -> dict[str, Any]:
    """What the trainer was fed in one optimizer step, as JSON values."""
    return {"version": VERSION, "kind": "step", **values}


def extras(record: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept beside the trajectory."""
    return {k: v for k, v in record.items() if k not in _OWN}


def encode(record: Mapping[str, Any] | list[Any]) -> bytes:
    """One line of JSON. What JSON has no word for (in a user's info or state) is written as its repr."""
    try:
        return orjson.dumps(record, _foreign, _OPTIONS)
    except TypeError:  # integers over 64 bits, lone surrogates, deep nesting: a policy can write them all
        return json.dumps(record, default=_foreign).encode() + b"\n"


def decode(line: bytes, where: object) -> dict[str, Any]:
    """The record in a line.

    Raises:
        StoreError: no record, or one of a newer version.
    """
    try:
        record: dict[str, Any] = json.loads(line)  # not orjson: it rounds large integers and refuses lone surrogates
        version = int(record["version"])
    except (ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{where}: holds something that is no episode: {type(e).__name__}: {e}") from e
    if version > VERSION:
        raise StoreError(
            f"{where}: written by a newer agentrl (record version {version}, this one reads up to {VERSION})"
        )
    return record


def is_episode(record: Mapping[str, Any]) -> bool:
    """An episode, and no optimizer step."""
    return bool(record.get("kind", "episode") == "episode")


def from_record(r: Mapping[str, Any], images: Path | None = None) -> Trajectory:
    """The trajectory of a record. `images`: the folder in which those that it names lie.

    Raises:
        StoreError: fields are missing or of the wrong type.
    """
    try:
        task, prompt = r["task"], r["task"]["prompt"]
        return Trajectory(
            episode_id=r["episode_id"],
            group_index=r["group_index"],
            index=r["index"],
            attempt=r["attempt"],
            task=Task(
                task["id"],
                prompt if isinstance(prompt, str) else tuple(read_images(prompt, images)),
                task["label"],
                task["metadata"],
            ),
            env=r["env"],
            segments=tuple(_read_segment(g, images) for g in r["segments"]),
            turns=tuple(_read_turn(t, images) for t in r["turns"]),
            stop_reason=StopReason(r["stop_reason"]),
            cause=r["cause"],
            detail=r.get("detail"),
            state=r["state"],
            rewards=r["rewards"],
            weights=r["weights"],
            seed=r["seed"],
            demonstration=r["demonstration"],
            timings=r["timings"],
        )
    except (KeyError, TypeError, ValueError) as e:
        name = r.get("episode_id", "?")
        raise StoreError(f"episode {name}: the record cannot be read: {type(e).__name__}: {e}") from e


def exactness_violations(trajectories: Iterable[Trajectory]) -> int:
    """Recompute the checksum of every turn's context from the recorded tokens; count those that are not what the engine was sent."""
    bad = 0
    for t in trajectories:
        ids = [s.ids for s in t.segments]
        bad += sum(
            zlib.crc32(array("i", ids[turn.segment][: turn.context_length]).tobytes()) != turn.context_crc
            for turn in t.turns
        )
    return bad


def _foreign(value: Any) -> Any:
    if isinstance(value, Image):
        return {"sha256": value.sha256}
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):  # orjson takes these itself
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _turn(t: Turn) -> dict[str, Any]:
    """Not `asdict`, which copies what users put into `info` and cannot copy everything. Calls, errors and results are JSON to orjson as they are."""
    a = t.action
    out = {
        "index": t.index,
        "segment": t.segment,
        "context_length": t.context_length,
        "action": {
            "text": a.text,
            "calls": a.calls,
            "errors": a.errors,
            "finish_reason": a.finish_reason,
            "answer": a.answer,
            "results": a.results,
        },
        "observation": {"messages": t.observation.messages},
        "reward": t.reward,
        "info": t.info,
        "state_key": t.state_key,
        "matched_stop": t.matched_stop,
        "context_crc": t.context_crc,
        "observation_cut_tokens": t.observation_cut_tokens,
        "seed": t.seed,
        "timings": t.timings,
        "agent_id": t.agent_id,
    }
    if t.context is not None:
        out["context"] = t.context
    return out


def _segment(s: Segment) -> dict[str, Any]:
    out: dict[str, Any] = {"agent_id": s.agent_id, "spans": [_span(x) for x in s.spans]}
    if s.images:
        out["images"] = [{"sha256": p.image.sha256, "at": p.at, "tokens": p.tokens} for p in s.images]
    return out


def _read_segment(g: Mapping[str, Any], images: Path | None) -> Segment:
    placed = tuple(Placed(_image(p["sha256"], images), p["at"], p["tokens"]) for p in g.get("images", ()))
    return Segment(tuple(map(_read_span, g["spans"])), g["agent_id"], placed)


def _span(s: Span) -> dict[str, Any]:
    out: dict[str, Any] = {"provenance": _PROVENANCES[s.provenance], "turn": s.turn, "ids": s.ids}
    if s.log_probs is not None:
        out |= {"log_probs": s.log_probs, "policy_version": s.policy_version, "temperature": s.temperature}
    return out


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
    """Recorded messages with the images that they name."""
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
    return Image(sha256, images / f"{sha256}.png" if images else None)


def _read_result(r: Mapping[str, Any], images: Path | None) -> ToolResult:
    parts = r.get("parts")
    return ToolResult(**{**r, "parts": tuple(_read_parts(parts, images))} if parts else r)


def _read_turn(t: Mapping[str, Any], images: Path | None) -> Turn:
    a = t["action"]
    action = Action(
        a["text"],
        tuple(ToolCall(**c) for c in a["calls"]),
        tuple(ParseError(**e) for e in a["errors"]),
        FinishReason(a["finish_reason"]),
        a["answer"],
        tuple(_read_result(x, images) for x in a["results"]),
    )
    observation = Observation(tuple(read_images(t["observation"]["messages"], images)))
    context = tuple(read_images(t["context"], images)) if t.get("context") else None
    return Turn(**{**t, "action": action, "observation": observation, "context": context})
