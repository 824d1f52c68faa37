"""The record of one optimizer step's batch, written beside the episodes, and the rows rebuilt from it.

Tokens, masks and the engine's log-probs are in the records of the episodes. A step record holds the segments in order with their weights and
advantages (for each token where they differ in a row; `advantage` is then the mean, `weight` the first), the trainer's log-probs of the trained
tokens, and the batch plan with the tokens of each micro-batch. `old_log_probs`, `ref_log_probs` and the others of `OPTIONAL_INPUTS` are the loss's
inputs; where the loss used its own log-probs (one optimizer step per rollout), `log_probs` holds those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.errors import StoreError
from agentrl.train.base import OPTIONAL_INPUTS, Floats, Row, Trainer
from agentrl.train.batch_plan import micro_batch_sizes, trainer_plan
from agentrl.train.rows import make_row
from agentrl.train.sample import Sample
from agentrl.types import role_id, split_role_id


def step_record(
    rows: Sequence[Row], trainer: Trainer, log_probs: Sequence[Floats] | None = None, **values: Any
) -> dict[str, Any]:
    """The fields of a step record. `log_probs`: as `Trainer.step` returned them; `values`: further fields."""
    current = log_probs if log_probs is not None else [None] * len(rows)
    plan = trainer_plan(trainer, rows)
    return {
        **values,
        "rows": [_row_record(row, own) for row, own in zip(rows, current, strict=True)],
        "plan": plan,
        "sizes": micro_batch_sizes(trainer, rows, plan),
        "tree_packing": trainer.tree_packing,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "multiple": trainer.multiple,
    }


def _row_record(row: Row, log_probs: Floats | None) -> dict[str, Any]:
    trained = np.flatnonzero(row.weights)
    first = trained[0] if len(trained) else 0
    episode_id, role = split_role_id(row.source[0])
    record: dict[str, Any] = {
        "episode_id": episode_id,
        "segment_index": row.source[1],
        **({"role": role} if role else {}),
        "tokens": len(row.tokens),
        "trained": len(trained),
        **({} if row.routed_experts is None else {"replays_experts": True}),
        "advantage": float(row.advantages[first]),
        "weight": float(row.weights[first]),
    }
    advantages = row.advantages[trained]
    if len(advantages) and (advantages != advantages[0]).any():
        record |= {"advantage": float(advantages.mean()), "advantages": advantages}
    weights = row.weights[trained]
    if len(weights) and (weights != weights[0]).any():
        record["weights"] = weights
    # values of trained tokens only: elsewhere they are 0. float32 arrays, which orjson writes with the fewest digits
    if row.old_log_probs is None and log_probs is not None:
        record["log_probs"] = log_probs[trained]
    for name in OPTIONAL_INPUTS:
        if (array := getattr(row, name)) is not None:
            record[name] = array[trained]
    return record


def rebuild_rows(record: Mapping[str, Any], sample: Callable[[str, int], Sample]) -> list[Row]:
    """The rows of a step, equal to those that were trained on. `sample` returns the sample of an episode id and a segment index.

    Raises:
        StoreError: a sample does not fit its record.
    """
    return [_rebuild(r, sample(r["episode_id"], r["segment_index"])) for r in record["rows"]]


def _rebuild(record: Mapping[str, Any], sample: Sample) -> Row:
    length = len(sample.tokens)
    trained = np.flatnonzero(np.array(sample.loss_mask)) + length - sample.response_length
    if length != record["tokens"] or len(trained) != record["trained"]:
        raise StoreError(
            f"episode {record['episode_id']}, segment {record['segment_index']}: recorded {record['tokens']} tokens, "
            f"{record['trained']} of them trained; its episode has {length} and {len(trained)}"
        )
    arrays: dict[str, Any] = {
        name: np.zeros(length, np.float32) for name in (*OPTIONAL_INPUTS, "weights") if name in record
    }
    for name, array in arrays.items():
        array[trained] = record[name]
    advantage = np.array(record["advantages"]) if "advantages" in record else record["advantage"]
    replay = record.get("replays_experts", False)
    row = replace(make_row(sample, advantage=advantage, weight=record["weight"], replay_experts=replay), **arrays)
    if "role" in record:
        return replace(row, source=(role_id(record["episode_id"], record["role"]), record["segment_index"]))
    return row
