"""One episode as the page shows it: turns, tokens in columns, and the rows that the trainer received."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from agentrl.core.message_images import Image, image_parts
from agentrl.store import extra_fields
from agentrl.store.blobs import Outputs, is_hash
from agentrl.store.episode_record import token_columns
from agentrl.view.segment_forest import origin_text, segment_forest

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
MAX_OUTPUT_CHARS = 1 << 20
"""Characters of a complete tool output that the page holds."""
_STEP_KEYS = ("step", "optimizer_step", "lr", "loss", "metrics", "micro_batch_tokens", "multiple", "tree_packing")
_REPLACEMENT = "\ufffd"
"""Ends a decoded text while the bytes of its last character are incomplete."""


def episode_detail(
    record: Mapping[str, Any],
    step: Mapping[str, Any] | None,
    decode: Decode | None,
    advantage: float | None,
    images: Path | None = None,
    outputs: Outputs | None = None,
) -> dict[str, Any]:
    """Return an episode as JSON values for the page.

    Args:
        record: the episode's record.
        step: the record of the optimizer step that trained on it; None if none did.
        decode: the tokenizer's; None shows tokens as ids.
        advantage: the episode's advantage; None if it was not trained on.
        images: folder of the images that the record refers to; they are embedded as data URLs, so that the page makes no request for them.
        outputs: complete tool outputs, for results of which the record holds only the beginning.
    """
    rows = trained_rows(record["episode_id"], step)
    row_of_segment = {r["segment_index"]: r for r in rows}
    sft = step is not None and (step.get("loss") or {}).get("kind") == "sft"
    extra = extra_fields(record)
    forest = segment_forest(record)
    return {
        **{k: v for k, v in record.items() if k not in extra and k != "segments"},
        **{k: extra.pop(k, None) for k in ("step", "split", "config", "fork")},
        "extra": extra,
        "advantage": advantage,
        "segments": [
            _segment(
                segment,
                origin=origin_text(forest[number]),
                decode=decode,
                row=row_of_segment.get(number) or {},
                contexts=[t["context_length"] for t in record["turns"] if t["segment"] == number],
                trained=("SAMPLED", "DEMONSTRATION") if sft else ("SAMPLED",),
                branch_turn=record.get("branch_turn", 0),
            )
            for number, segment in enumerate(record["segments"])
        ],
        "forest": forest,
        "rows": rows,
        "images": {name: _data_url(images / f"{name}.png") for name in image_names(record)} if images else {},
        "outputs": dict(_outputs(record, outputs)) if outputs else {},
        "training_step": {k: step.get(k) for k in _STEP_KEYS} | {"rows": len(step["rows"])} if step else None,
    }


def _segment(
    segment: Mapping[str, Any],
    *,
    origin: str,
    decode: Decode | None,
    row: Mapping[str, Any],
    contexts: list[int],
    trained: tuple[str, ...],
    branch_turn: int,
) -> dict[str, Any]:
    """Return the tokens of a segment, one list per property. `row` is the training row of the segment; {} if it was not trained on."""
    columns = token_columns(segment, trained, branch_turn)

    def per_token(trained_values: Sequence[float] | None) -> list[float | None] | None:
        if trained_values is None:
            return None
        values = iter(trained_values)
        return [next(values, None) if masked else None for masked in columns["mask"]]

    return {
        "agent_id": segment["agent_id"],
        "origin": origin,
        **columns,
        "text": token_texts(columns["ids"], decode) if decode else None,
        "images": segment.get("images", ()),
        "contexts": contexts,
        **({"advantage": row["advantage"]} if "role" in row else {}),
        "trainer_log_prob": per_token(row.get("old_log_probs", row.get("log_probs"))),
        "ref_log_probs": per_token(row.get("ref_log_probs")),
    }


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds. A character spread over several tokens is attributed to the last of them."""
    texts: list[str] = []
    pending: list[int] = []
    previous: list[int] = []
    for i in ids:
        pending.append(i)
        text = decode([*previous, *pending])[len(decode(previous)) :]
        if text.endswith(_REPLACEMENT) and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        previous, pending = [i], []
    if pending:
        texts[-1] = decode([*previous, *pending])[len(decode(previous)) :]
    return texts


def trained_rows(episode_id: str, step: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows of an episode in an optimizer step: number in the batch, rank, micro-batch with its members, width and padding.

    The width is the number of tokens of the micro-batch, in which rows are packed. Records without sizes are of rows that were padded to the
    longest one, without its last token, rounded up to a multiple.
    """
    if step is None:
        return []
    rows, multiple = step["rows"], step.get("multiple") or 1
    lengths = [r["tokens"] for r in rows]
    places = {
        row: (rank, number, part)
        for rank, micro_batches in enumerate(step.get("plan") or ())
        for number, part in enumerate(micro_batches)
        for row in part
    }
    placed_rows = []
    for number, row in enumerate(rows):
        if row["episode_id"] != episode_id:
            continue
        rank, micro_batch, part = places.get(number, (None, None, [number]))
        if step.get("sizes") and rank is not None:
            width, padding = step["sizes"][rank][micro_batch], 0
        else:
            width = -(-max(1, *(lengths[i] - 1 for i in part)) // multiple) * multiple
            padding = width - (lengths[number] - 1)
        members = [{k: rows[i][k] for k in ("episode_id", "segment_index", "tokens")} for i in part]
        place = {"number": number, "of": len(rows), "rank": rank, "micro_batch": micro_batch, "members": members}
        placed_rows.append({**row, **place, "width": width, "padding": padding})
    return placed_rows


def image_names(record: Mapping[str, Any]) -> list[str]:
    """Return the hashes of all images that a record refers to."""
    prompt = record["task"]["prompt"]
    messages = [] if isinstance(prompt, str) else list(prompt)
    messages += chain.from_iterable(t["observation"]["messages"] for t in record["turns"])
    messages += chain.from_iterable(t.get("context") or () for t in record["turns"])
    messages += ({"content": r.get("parts")} for t in record["turns"] for r in t["action"]["results"])
    references = [p["image"] for p in image_parts(messages) if isinstance(p.get("image"), Mapping)]
    references += chain.from_iterable(s.get("images", ()) for s in record["segments"])
    hashes = dict.fromkeys(str(reference.get("sha256")) for reference in references)
    return [name for name in hashes if is_hash(name)]


def _data_url(file: Path) -> str | None:
    return Image(file.stem, file).url if file.is_file() and not file.is_symlink() else None


def _outputs(record: Mapping[str, Any], outputs: Outputs) -> Iterator[tuple[str, str]]:
    for result in (r for t in record["turns"] for r in t["action"]["results"] if r.get("sha256")):
        text = outputs.read(str(result["sha256"]))
        if text is not None:
            yield result["sha256"], text[:MAX_OUTPUT_CHARS]
