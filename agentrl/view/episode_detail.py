"""One episode as the page shows it: turns, tokens in columns, and the rows that the trainer was fed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from agentrl.core.message_images import Image, image_parts
from agentrl.store import extra_fields
from agentrl.store.blobs import Outputs
from agentrl.types import Provenance

Decode = Callable[[Sequence[int]], str]
MOST_OUTPUT = 1 << 20
"""characters of a tool's whole output that the page holds"""
_SHOWN = (
    *(
        "episode_id",
        "group_index",
        "index",
        "attempt",
        "task",
        "env",
        "stop_reason",
        "status",
        "cause",
        "state",
        "rewards",
    ),
    *("weights", "score", "seed", "timings", "turns"),
)
_STEP = ("step", "optimizer_step", "lr", "loss", "metrics", "micro_batch_tokens", "multiple")
_HIDDEN = ("step", "split", "config", "fork")


def episode_detail(
    record: Mapping[str, Any],
    fed: Mapping[str, Any] | None,
    decode: Decode | None,
    advantage: float | None,
    images: Path | None = None,
    outputs: Outputs | None = None,
) -> dict[str, Any]:
    """JSON values of an episode. `fed`: the record of the step that trained on it; `decode` None: tokens show as ids.

    `images`: the folder with those that the record names; they go in whole, as data URLs, so that the page asks for nothing.
    `outputs`: of tools, whole, where the record holds only their beginning; so much of them goes in.
    """
    rows = fed_rows(record["episode_id"], fed)
    by_segment = {r["segment_index"]: r for r in rows}
    taught = fed is not None and (fed.get("loss") or {}).get("kind") == "sft"
    more = {k: v for k, v in extra_fields(record).items() if k not in _HIDDEN}
    return {
        **{k: record[k] for k in _SHOWN},
        **{k: record.get(k) for k in _HIDDEN},
        "extra": more,
        "advantage": advantage,
        "segments": [
            segment_columns(s, decode, by_segment.get(i), record["turns"], i, taught=taught)
            for i, s in enumerate(record["segments"])
        ],
        "rows": rows,
        "images": {name: _url(images / f"{name}.png") for name in image_names(record)} if images else {},
        "outputs": {name: text[:MOST_OUTPUT] for name, text in _outputs(record, outputs)} if outputs else {},
        "fed": fed_summary(fed),
    }


def image_names(record: Mapping[str, Any]) -> list[str]:
    """The hashes of all images that a record names."""
    prompt = record["task"]["prompt"]
    messages = [] if isinstance(prompt, str) else list(prompt)
    messages += chain.from_iterable(t["observation"]["messages"] for t in record["turns"])
    messages += chain.from_iterable(t.get("context") or () for t in record["turns"])
    messages += ({"content": r.get("parts")} for t in record["turns"] for r in t["action"]["results"])
    named = [p["image"] for p in image_parts(messages) if isinstance(p.get("image"), Mapping)]
    named += chain.from_iterable(s.get("images", ()) for s in record["segments"])
    return list(dict.fromkeys(n["sha256"] for n in named if re.fullmatch("[0-9a-f]{64}", str(n.get("sha256")))))


def _url(file: Path) -> str | None:
    return Image(file.stem, file).url if file.exists() else None


def _outputs(record: Mapping[str, Any], outputs: Outputs) -> Iterator[tuple[str, str]]:
    for result in (r for t in record["turns"] for r in t["action"]["results"] if r.get("sha256")):
        text = outputs.read(str(result["sha256"]))
        if text is not None:
            yield result["sha256"], text


def segment_columns(
    segment: Mapping[str, Any],
    decode: Decode | None,
    row: Mapping[str, Any] | None,
    turns: Sequence[Mapping[str, Any]],
    number: int,
    *,
    taught: bool = False,
) -> dict[str, Any]:
    """The tokens of a segment, one list per property. `taught`: trained by SFT, on what an expert wrote too."""
    spans = segment["spans"]
    ids = [i for s in spans for i in s["ids"]]
    trained = ("SAMPLED", "DEMONSTRATION") if taught else ("SAMPLED",)
    mask = [s["provenance"] in trained for s in spans for _ in s["ids"]]
    out: dict[str, Any] = {
        "agent_id": segment["agent_id"],
        "ids": ids,
        "text": pieces(ids, decode) if decode else None,
        "provenance": [int(Provenance[s["provenance"]]) for s in spans for _ in s["ids"]],
        "turn": [s["turn"] for s in spans for _ in s["ids"]],
        "mask": [int(x) for x in mask],
        "log_prob": [v for s in spans for v in (s.get("log_probs") or [None] * len(s["ids"]))],
        "version": [s.get("policy_version") for s in spans for _ in s["ids"]],
        "temperature": [s.get("temperature") for s in spans for _ in s["ids"]],
        "images": segment.get("images", ()),
        "contexts": [t["context_length"] for t in turns if t["segment"] == number],
    }
    row = row or {}
    for name, given in (
        ("trainer_log_prob", row.get("old_log_probs", row.get("log_probs"))),
        ("ref_log_probs", row.get("ref_log_probs")),
    ):
        values = iter(given or ())
        out[name] = None if given is None else [next(values, None) if m else None for m in mask]
    return out


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token, as it adds to the text before it; of a character spread over several tokens, all of it at the last."""
    out: list[str] = []
    held: list[int] = []
    before: list[int] = []
    for i in ids:
        held.append(i)
        text = decode([*before, *held])[len(decode(before)) :]
        if text.endswith("\ufffd") and len(held) < 4:
            out.append("")
            continue
        out.append(text)
        before, held = [i], []
    if held:
        out[-1] = decode([*before, *held])[len(decode(before)) :]
    return out


def fed_rows(episode_id: str, fed: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The rows of this episode in a step: number in the batch, rank, micro-batch with its members, width and padding.

    The width is that of `train.batch.collate`: the longest row but its last token, rounded up to a multiple (16 on a GPU).
    """
    if fed is None:
        return []
    rows, multiple = fed["rows"], fed.get("multiple") or 1
    lengths = [r["tokens"] for r in rows]
    places = {
        row: (rank, n, part)
        for rank, share in enumerate(fed.get("plan") or ())
        for n, part in enumerate(share)
        for row in part
    }
    out = []
    for number, r in enumerate(rows):
        if r["episode_id"] != episode_id:
            continue
        rank, micro_batch, part = places.get(number, (None, None, [number]))
        width = -(-max(1, *(lengths[i] - 1 for i in part)) // multiple) * multiple
        members = [
            {"episode_id": rows[i]["episode_id"], "segment_index": rows[i]["segment_index"], "tokens": lengths[i]}
            for i in part
        ]
        place = {"number": number, "of": len(rows), "rank": rank, "micro_batch": micro_batch, "members": members}
        out.append({**r, **place, "width": width, "padding": width - (lengths[number] - 1)})
    return out


def fed_summary(fed: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The step as a whole."""
    return None if fed is None else {k: fed.get(k) for k in _STEP} | {"rows": len(fed["rows"])}
