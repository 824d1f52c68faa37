"""The index: one short line per record, so that a folder of 100,000 episodes opens without reading them.

Beside `000000.jsonl.zst` lies `000000.index`, a line for each record that says where its frame is. An index is never needed and never trusted:
its entries must follow each other without a gap and lie within the data file; what it lacks is read from the frames themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import orjson

from agentrl.errors import StoreError
from agentrl.store.episode_record import encode

LAYOUT = 1
"""of an entry's line; entries of another are not read"""
_TEXT = 120
"""characters of a task's prompt that the list shows"""


@dataclass(slots=True)
class Entry:
    """What the index knows of one record."""

    at: int
    """byte of the data file at which its frame begins"""
    length: int
    """bytes of the frame"""
    kind: str = "episode"
    """'episode', or 'step': what the trainer was fed in an optimizer step"""
    id: str = ""
    group: int = 0
    index: int = 0
    attempt: int = 0
    step: int | None = None
    """rollout that it belongs to"""
    split: str = ""
    """'train' or 'eval/NAME'"""
    stop: str = ""
    status: str = ""
    cause: str | None = None
    score: float = 0.0
    rewards: dict[str, float | None] = field(default_factory=dict)
    turns: int = 0
    sampled: int = 0
    """tokens that the policy sampled"""
    tokens: int = 0
    """all tokens"""
    version: int | None = None
    """oldest weights that sampled it"""
    seconds: float = 0.0
    invalid: int = 0
    """turns that could not be parsed"""
    task: str = ""
    text: str = ""
    """the beginning of the prompt"""
    answer: str | None = None
    config: str | None = None
    """fingerprint of the settings"""
    advantages: dict[str, float] | None = None
    """of a step: by episode id"""
    file: int = -1
    """number of its data file; known from the index file's name, not written"""


_NAMES = tuple(f.name for f in fields(Entry) if f.name != "file")


def summary(record: Mapping[str, Any], at: int, length: int) -> Entry:
    """The entry of a record.

    Raises:
        StoreError: fields are missing or of the wrong type.
    """
    try:
        return _summary(record, at, length)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        name = record.get("episode_id", "?")
        raise StoreError(f"episode {name}: the record cannot be read: {type(e).__name__}: {e}") from e


def _summary(record: Mapping[str, Any], at: int, length: int) -> Entry:
    if record.get("kind") == "step":
        advantages = {str(r["episode_id"]): float(r["advantage"]) for r in record.get("rows", ())}
        return Entry(at, length, "step", step=record.get("step"), split="train", advantages=advantages)
    spans = [s for g in record["segments"] for s in g["spans"]]
    sampled = [s for s in spans if s["provenance"] == "SAMPLED"]
    turns = record["turns"]
    prompt = record["task"]["prompt"]
    if not isinstance(prompt, str):
        prompt = next((text for m in reversed(prompt) if (text := _text_of(m.get("content")))), "")
    answers = [t["action"]["answer"] for t in turns if t["action"]["answer"] is not None]
    return Entry(
        at,
        length,
        id=record["episode_id"],
        group=record["group_index"],
        index=record["index"],
        attempt=record["attempt"],
        step=record.get("step"),
        split=record.get("split", ""),
        stop=record["stop_reason"],
        status=record["status"],
        cause=record["cause"],
        score=record["score"],
        rewards=dict(record["rewards"]),
        turns=len(turns),
        sampled=sum([len(s["ids"]) for s in sampled]),
        tokens=sum([len(s["ids"]) for s in spans]),
        version=min([s["policy_version"] for s in sampled], default=None),
        seconds=record["timings"].get("episode_s", 0.0),
        invalid=sum([bool(t["action"]["errors"]) for t in turns]),
        task=str(record["task"]["id"]),
        text=_clean(prompt),
        answer=_clean(answers[-1]) if answers else None,
        config=record.get("config"),
    )


def _text_of(content: Any) -> str:
    """The text of a content; of one in parts, without its images."""
    if isinstance(content, (list, tuple)):
        return " ".join(str(p.get("text", "")) for p in content).strip()
    return content if isinstance(content, str) else ""


def _clean(text: str) -> str:
    """The beginning of a text that may hold lone surrogates."""
    return " ".join(text[: 2 * _TEXT].split())[:_TEXT].encode("utf-8", errors="replace").decode()


def write_entry(entry: Entry) -> bytes:
    """Its line: a JSON array of the layout's number and the fields in order, which is quicker to read than an object."""
    return encode([LAYOUT, *(getattr(entry, n) for n in _NAMES)])


def read_entries(raw: bytes, begin: int, size: int, file: int) -> tuple[list[Entry], int]:
    """Entries in whole lines of an index, and the byte of the data file up to which they cover it.

    Stops at the first that cannot be true. The garbage collector pauses meanwhile: it would go through all that was made, again and again.
    """
    found: list[Entry] = []
    at = begin
    collects = gc.isenabled()
    gc.disable()
    try:
        for line in raw.split(b"\n")[:-1]:
            layout, *values = orjson.loads(line)
            entry = Entry(*values)
            if layout != LAYOUT or entry.at != at or entry.length <= 0 or at + entry.length > size:
                break
            entry.file = file
            at += entry.length
            found.append(entry)
    except (ValueError, TypeError):
        pass  # not one of our lines: what follows is read from the frames
    finally:
        if collects:
            gc.enable()
    return found, at
