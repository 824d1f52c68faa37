"""The index: one short line per record, so that a folder of 100,000 episodes opens without reading them.

Beside `000000.jsonl.zst` lies `000000.index`, with a line for each record that says where its frame is. The index is optional and verified:
its entries must follow each other without a gap and lie within the data file. What it lacks is read from the frames themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import orjson

from agentrl.store.episode_record import encode, unreadable

LAYOUT = 1
"""Version of an index line. Lines of another version are not read."""
_TEXT = 120
"""Characters of a prompt or an answer that the index holds."""


@dataclass(slots=True)
class IndexEntry:
    """What the index holds of one record. The order of the fields is that of an index line, from which it is built positionally."""

    offset: int
    """byte of the data file at which the record's frame begins"""
    length: int
    """bytes of the frame"""
    kind: str = "episode"
    """'episode', or 'step' for the batch of an optimizer step"""
    id: str = ""
    group: int = 0
    index: int = 0
    attempt: int = 0
    step: int | None = None
    """the rollout that it belongs to"""
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
    """the oldest policy version that sampled a token of it"""
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
    """of a step: the advantage of each episode, by id"""
    file: int = -1
    """number of the data file; not written, known from the name of the index file"""


_NAMES = tuple(f.name for f in fields(IndexEntry) if f.name != "file")
_values = attrgetter(*_NAMES)


def index_entry(record: Mapping[str, Any], offset: int, length: int, file: int = -1) -> IndexEntry:
    """Return the entry of a record.

    Raises:
        StoreError: fields of the record are missing or of the wrong type.
    """
    try:
        summary = _step_summary(record) if record.get("kind") == "step" else _episode_summary(record)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise unreadable(record, e) from e
    return IndexEntry(offset=offset, length=length, file=file, **summary)


def _step_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    advantages = {str(r["episode_id"]): float(r["advantage"]) for r in record.get("rows", ())}
    return {"kind": "step", "step": record.get("step"), "split": "train", "advantages": advantages}


def _episode_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    spans = [span for segment in record["segments"] for span in segment["spans"]]
    sampled = [span for span in spans if span["provenance"] == "SAMPLED"]
    actions = [turn["action"] for turn in record["turns"]]
    answers = [action["answer"] for action in actions if action["answer"] is not None]
    prompt = record["task"]["prompt"]
    if not isinstance(prompt, str):
        prompt = next((text for m in reversed(prompt) if (text := _text_of(m.get("content")))), "")
    return {
        "id": record["episode_id"],
        "group": record["group_index"],
        "index": record["index"],
        "attempt": record["attempt"],
        "step": record.get("step"),
        "split": record.get("split", ""),
        "stop": record["stop_reason"],
        "status": record["status"],
        "cause": record["cause"],
        "score": record["score"],
        "rewards": dict(record["rewards"]),
        "turns": len(actions),
        "sampled": sum([len(span["ids"]) for span in sampled]),
        "tokens": sum([len(span["ids"]) for span in spans]),
        "version": min([span["policy_version"] for span in sampled], default=None),
        "seconds": record["timings"].get("episode_s", 0.0),
        "invalid": sum([bool(action["errors"]) for action in actions]),
        "task": str(record["task"]["id"]),
        "text": _shortened(prompt),
        "answer": _shortened(answers[-1]) if answers else None,
        "config": record.get("config"),
    }


def _text_of(content: Any) -> str:
    """Return the text of a message's content, without its images."""
    if isinstance(content, (list, tuple)):
        return " ".join(str(part.get("text", "")) for part in content).strip()
    return content if isinstance(content, str) else ""


def _shortened(text: str) -> str:
    """Return the beginning of a text on one line, lone surrogates replaced."""
    return " ".join(text[: 2 * _TEXT].split())[:_TEXT].encode("utf-8", errors="replace").decode()


def write_entry(entry: IndexEntry) -> bytes:
    """Return the line of an entry: a JSON array of the layout's version and the fields in order. It parses faster than an object."""
    return encode([LAYOUT, *_values(entry)])


def read_entries(raw: bytes, begin: int, size: int, file: int) -> tuple[list[IndexEntry], int]:
    """Return the entries in complete lines of an index, and the byte of the data file up to which they cover it.

    Reading stops at the first entry that cannot be right. The garbage collector is off meanwhile: it would scan the new entries repeatedly.
    """
    entries: list[IndexEntry] = []
    covered = begin
    collects = gc.isenabled()
    gc.disable()
    try:
        for line in raw.split(b"\n")[:-1]:
            layout, *values = orjson.loads(line)
            entry = IndexEntry(*values)
            if layout != LAYOUT or entry.offset != covered or entry.length <= 0 or covered + entry.length > size:
                break
            entry.file = file
            covered += entry.length
            entries.append(entry)
    except (ValueError, TypeError):
        pass  # not a line of this index: the remaining records are read from the frames
    finally:
        if collects:
            gc.enable()
    return entries, covered
