"""Whether an engine has the trainer's weights: a checksum of every parameter where the server gives one that can be computed here too, and
log-probs of a fixed sequence of ids by both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.supervisor import Failures, failures_of
from agentrl.errors import EngineFailure
from agentrl.train.base import Row

PROBE_TOKENS = 48
LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""by the trainer's dtype, the largest mean absolute difference in nats that two implementations of the same weights may show"""


@dataclass(frozen=True)
class Expected:
    """What the trainer says of its weights."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """of ids[1:]"""
    limit: float
    checksums: dict[str, dict[str, str]]
    """by kind, of every parameter by the server's name"""


async def probe_ids(fleet: Fleet) -> list[int]:
    """What the model itself says after an arbitrary token: of ids that it finds likely, two implementations of its weights say nearly the
    same in bf16 too, while of ids drawn at random they may be apart by more than wrong weights would show.
    """
    first = next(m.engine for m in fleet.members if m.state == "ready")
    start = Random(0).randrange(first.vocab_size or 256)
    length = min(PROBE_TOKENS, first.context_length - 2)
    return [start, *await first.greedy([start], length - 1)]


async def expect(trainer: Any, fleet: Fleet, probe: Sequence[int]) -> Expected:
    """Ask the trainer."""
    ids, length = np.array(probe, np.int32), len(probe)
    ones, zeros = np.ones(length, np.float32), np.zeros(length, np.float32)
    weights = ones.copy()
    weights[0] = 0
    row = Row(ids, weights, zeros, zeros, ones)
    log_probs = (await asyncio.to_thread(trainer.log_probs, [row] * trainer.copies))[0]
    sums: dict[str, dict[str, str]] = {}
    for kind in {m.engine.checksum_kind for m in fleet.members} - {""}:
        stages = await asyncio.to_thread(trainer.deliver, "checksums", kind=kind)
        sums[kind] = {name: value for stage in stages for name, value in stage.items()}
    return Expected(tuple(ids.tolist()), tuple(log_probs[1:].tolist()), LIMITS[trainer.dtype], sums)


async def compare(engines: Sequence[SGLangEngine], expected: Expected) -> tuple[Failures, float | None]:
    """Engines whose weights are others, and the largest difference of a log-prob."""
    differences: list[float] = []

    async def check(engine: SGLangEngine) -> None:
        differences.append(await _one(engine, expected))

    failed = await failures_of(engines, check)
    return failed, max(differences, default=None)


async def _one(engine: SGLangEngine, expected: Expected) -> float:
    """The largest difference of a log-prob.

    Raises:
        EngineFailure: the weights are others.
    """
    mine = expected.checksums.get(engine.checksum_kind)
    sums = await engine.checksums() if mine else None
    if mine and sums is not None and sums != mine:
        differ = sorted(k for k in sums.keys() | mine.keys() if sums.get(k) != mine.get(k))
        raise EngineFailure(
            f"{len(differ)} of {len(mine)} parameters at {engine.address} are not the trainer's: {', '.join(differ[:3])}",
            "engine: weights differ",
        )
    scores = await engine.score(expected.ids)
    differences = np.abs(np.array(scores) - np.array(expected.log_probs))
    if not differences.mean() <= expected.limit:
        raise EngineFailure(
            f"log-probs at {engine.address} differ from the trainer's by {differences.mean():.4f} nat in the mean "
            f"(at most {expected.limit:g} is expected of the same weights)",
            "engine: weights differ",
        )
    return float(differences.max())
