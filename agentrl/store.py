"""The record of episodes (design §9): one episode is one zstd frame holding one line of versioned JSON, written whole and flushed.

A folder of files `000000.jsonl.zst`, `000001.jsonl.zst`, …; any zstd reads them (`zstd -dc`). A frame that a crash cut short is
skipped.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from agentrl.errors import StoreError
from agentrl.types import (
    Action,
    FinishReason,
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

VERSION = 1
"""of the record's layout; readers accept this and older ones"""
_ROTATE_BYTES = 256 << 20
_CHUNK = 1 << 18


class EpisodeWriter:
    """Appends episodes to a folder. One writer at a time."""

    def __init__(self, folder: Path, level: int = 3) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
        files = sorted(folder.glob("*.jsonl.zst"))
        # a file of its own after what is there: a crash may have cut the last frame short, and nothing after that could be read
        self._number = _number(files[-1]) + bool(files[-1].stat().st_size) if files else 0
        self._file: BinaryIO = self._open()

    def write(self, trajectory: Trajectory, **extra: Any) -> None:
        """Append one episode, whole, and flush. `extra` (step, config fingerprint, …) is kept beside it."""
        self._file.write(self._compressor.compress(_line(to_record(trajectory, **extra))))
        self._file.flush()
        if self._file.tell() > _ROTATE_BYTES:
            self._file.close()
            self._number += 1
            self._file = self._open()

    def position(self) -> tuple[int, int]:
        """(file number, bytes): what `truncate` goes back to."""
        return self._number, self._file.tell()

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _open(self) -> BinaryIO:
        return (self.folder / f"{self._number:06d}.jsonl.zst").open("ab")


def truncate(folder: Path, number: int, size: int) -> None:
    """Go back to a position: later files and bytes are removed (resuming from a checkpoint)."""
    for file in sorted(folder.glob("*.jsonl.zst")):
        at = _number(file)
        if at > number:
            file.unlink()
        elif at == number and file.stat().st_size > size:
            os.truncate(file, size)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file or folder, in order of writing. A last frame that a crash cut short is skipped.

    Raises:
        StoreError: no such file, one that is damaged, or a record of a newer version.
    """
    files = sorted(path.glob("*.jsonl.zst")) if path.is_dir() else [path]
    if not path.exists():
        raise StoreError(f"no episodes at {path}")
    for file in files:
        for line in _frames(file):
            try:
                record: dict[str, Any] = json.loads(
                    line
                )  # not orjson: it rounds large integers and refuses lone surrogates
                version = int(record["version"])
            except (ValueError, KeyError, TypeError) as e:
                raise StoreError(f"{file}: holds something that is no episode: {type(e).__name__}: {e}") from e
            if version > VERSION:
                raise StoreError(
                    f"{file}: written by a newer agentrl (record version {version}, this one reads up to {VERSION})"
                )
            yield record


def read_episodes(path: Path) -> Iterator[Trajectory]:
    """Trajectories of a file or folder."""
    return (from_record(r) for r in read_records(path))


def _frames(file: Path) -> Iterator[bytes]:
    """Whole frames, in order; stops before one that was cut short. Read in chunks, so that a large file costs no memory."""
    with file.open("rb") as f:
        rest = b""
        while True:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts: list[bytes] = []
            while not frame.eof:
                chunk = rest or f.read(_CHUNK)
                if not chunk:
                    return
                rest = b""
                try:
                    parts.append(frame.decompress(chunk))
                except zstandard.ZstdError as e:
                    raise StoreError(f"{file}: damaged before byte {f.tell()}: {e}") from e
            rest = frame.unused_data
            yield b"".join(parts)


def _line(record: dict[str, Any]) -> bytes:
    """One line of JSON. What JSON has no word for (in a user's info or state) is written as its repr."""
    try:
        return orjson.dumps(
            record, _foreign, orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        )
    except TypeError:  # integers over 64 bits, lone surrogates, deep nesting: a policy can write them all
        return json.dumps(record, default=_foreign).encode() + b"\n"


def _foreign(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _number(file: Path) -> int:
    return int(file.name.split(".")[0])


def to_record(t: Trajectory, **extra: Any) -> dict[str, Any]:
    """A trajectory as JSON values."""
    return {
        "version": VERSION,
        **extra,
        "episode_id": t.episode_id,
        "group_index": t.group_index,
        "index": t.index,
        "attempt": t.attempt,
        "task": {"id": t.task.id, "prompt": t.task.prompt, "label": t.task.label, "metadata": dict(t.task.metadata)},
        "env": t.env,
        "segments": [{"agent_id": s.agent_id, "spans": [_span(x) for x in s.spans]} for s in t.segments],
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
    }


def _turn(t: Turn) -> dict[str, Any]:
    """Not `asdict`, which copies what users put into `info` and cannot copy everything."""
    action = _fields(t.action) | {
        "calls": [_fields(c) for c in t.action.calls],
        "errors": [_fields(e) for e in t.action.errors],
        "results": [_fields(r) for r in t.action.results],
        "finish_reason": t.action.finish_reason.value,
    }
    return _fields(t) | {"action": action, "observation": {"messages": list(t.observation.messages)}}


def _fields(obj: Any) -> dict[str, Any]:
    return {f.name: getattr(obj, f.name) for f in fields(obj)}


def _span(s: Span) -> dict[str, Any]:
    out: dict[str, Any] = {"provenance": s.provenance.name, "turn": s.turn, "ids": s.ids}
    if s.log_probs is not None:
        out |= {"log_probs": s.log_probs, "policy_version": s.policy_version, "temperature": s.temperature}
    return out


def from_record(r: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record.

    Raises:
        StoreError: fields are missing or of the wrong type.
    """
    try:
        prompt = r["task"]["prompt"]
        return Trajectory(
            episode_id=r["episode_id"],
            group_index=r["group_index"],
            index=r["index"],
            attempt=r["attempt"],
            task=Task(
                r["task"]["id"],
                prompt if isinstance(prompt, str) else tuple(prompt),
                r["task"]["label"],
                r["task"]["metadata"],
            ),
            env=r["env"],
            segments=tuple(Segment(tuple(_read_span(s) for s in g["spans"]), g["agent_id"]) for g in r["segments"]),
            turns=tuple(_read_turn(t) for t in r["turns"]),
            stop_reason=StopReason(r["stop_reason"]),
            cause=r["cause"],
            state=r["state"],
            rewards=r["rewards"],
            weights=r["weights"],
            seed=r["seed"],
            demonstration=r["demonstration"],
            timings=r["timings"],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise StoreError(
            f"episode {r.get('episode_id', '?')}: the record cannot be read: {type(e).__name__}: {e}"
        ) from e


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


def _read_turn(t: Mapping[str, Any]) -> Turn:
    a = t["action"]
    action = Action(
        a["text"],
        tuple(ToolCall(**c) for c in a["calls"]),
        tuple(ParseError(**e) for e in a["errors"]),
        FinishReason(a["finish_reason"]),
        a["answer"],
        tuple(ToolResult(**x) for x in a["results"]),
    )
    return Turn(**{**t, "action": action, "observation": Observation(tuple(t["observation"]["messages"]))})


def exactness_violations(trajectories: Iterable[Trajectory]) -> int:
    """Recompute, for every turn, the checksum of its context from the recorded tokens; count those that differ from what the engine was sent."""
    bad = 0
    for t in trajectories:
        ids = [s.ids for s in t.segments]
        bad += sum(
            zlib.crc32(array("i", ids[turn.segment][: turn.context_length]).tobytes()) != turn.context_crc
            for turn in t.turns
        )
    return bad
