"""What the trainer was fed in one optimizer step, for the record beside the episodes, and the rows made from it again.

Tokens, masks and engine log-probs are in the episodes already. Kept here: which segments in which order, each one's advantage and weight,
the trainer's own log-probs of the trained tokens, the plan of micro-batches, and of what their padded length is a multiple.
`old_log_probs` and `ref_log_probs` are what the loss was given; where it took its own (one optimizer step per rollout), `log_probs` are those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.errors import StoreError
from agentrl.train.base import Floats, Row
from agentrl.train.batch_plan import plan
from agentrl.train.sample import Sample

_OPTIONAL = ("old_log_probs", "ref_log_probs")


def step_record(
    rows: Sequence[Row], trainer: Any, log_probs: Sequence[Floats] | None = None, **values: Any
) -> dict[str, Any]:
    """The fields of a record of kind 'step'.

    `trainer` tells how it deals rows out and pads them (`copies`, `micro_batch_tokens`, `multiple`); of one that does not, no plan is kept.
    `log_probs`: as `Trainer.step` returned them.
    """
    current = log_probs if log_probs is not None else [None] * len(rows)
    record = {**values, "rows": [_row(r, lp) for r, lp in zip(rows, current, strict=True)]}
    copies, most = getattr(trainer, "copies", None), getattr(trainer, "micro_batch_tokens", None)
    if copies and most:
        record["plan"] = plan([len(r.tokens) for r in rows], copies, most)
        record |= {"micro_batch_tokens": most, "multiple": getattr(trainer, "multiple", 1)}
    return record


def _row(row: Row, log_probs: Floats | None) -> dict[str, Any]:
    trained = np.flatnonzero(row.weights)
    first = trained[0] if len(trained) else 0
    out: dict[str, Any] = {
        "episode_id": row.source[0],
        "segment_index": row.source[1],
        "tokens": len(row.tokens),
        "trained": len(trained),
        "advantage": float(row.advantages[first]),
        "weight": float(row.weights[first]),
    }
    if row.old_log_probs is None and log_probs is not None:
        out["log_probs"] = log_probs[trained]
    # per trained token only, as elsewhere they are 0; float32 arrays, which JSON takes with as few digits as they need
    return out | {n: getattr(row, n)[trained] for n in _OPTIONAL if getattr(row, n) is not None}


def rebuild_rows(record: Mapping[str, Any], sample: Callable[[str, int], Sample]) -> list[Row]:
    """The rows of a step, from its record and the samples of its episodes (`sample(episode_id, segment_index)`), array by array as they were.

    Raises:
        StoreError: a sample does not fit what is recorded.
    """
    return [_rebuild(r, sample(r["episode_id"], r["segment_index"])) for r in record["rows"]]


def _rebuild(r: Mapping[str, Any], s: Sample) -> Row:
    n, start = len(s.tokens), len(s.tokens) - s.response_length
    mask = np.zeros(n, np.float32)
    mask[start:] = s.loss_mask
    trained = np.flatnonzero(mask)
    if n != r["tokens"] or len(trained) != r["trained"]:
        raise StoreError(
            f"episode {r['episode_id']}, segment {r['segment_index']}: recorded {r['tokens']} tokens, {r['trained']} of them trained; "
            f"its episode gives {n} and {len(trained)}"
        )
    log_probs = np.zeros(n, np.float32)
    log_probs[start:] = s.rollout_log_probs or 0.0
    more = {name: np.zeros(n, np.float32) for name in _OPTIONAL if name in r}
    for name, values in more.items():
        values[trained] = r[name]
    return Row(
        tokens=np.asarray(s.tokens, np.int32),
        weights=mask * np.float32(r["weight"]),
        advantages=mask * np.float32(r["advantage"]),
        rollout_log_probs=log_probs,
        temperature=np.where(mask > 0, np.float32(s.temperature or 1.0), np.float32(1.0)).astype(np.float32),
        source=(r["episode_id"], r["segment_index"]),
        **more,
    )
