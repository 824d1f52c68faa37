"""Verifies that an engine has the trainer's weights: by a checksum of every parameter where the server reports checksums that the trainer can
compute too, and by log-probs of one fixed sequence, computed by both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Failures, failures_of
from agentrl.engine.sglang.protocol import ids_below
from agentrl.errors import EngineFailure
from agentrl.train.base import Row, Trainer

PROBE_STARTS, PROBE_RUN = 4, 6
"""The probe is this many runs of this many tokens, twice."""
LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean absolute difference in nats between two implementations of the same weights, by the trainer's dtype."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an engine with the trainer's weights must return."""

    ids: tuple[int, ...]
    """the fixed sequence"""
    log_probs: tuple[float, ...]
    """the trainer's log-probs of ids[1:]"""
    limit: float
    """upper bound of the mean absolute difference of log-probs, in nats"""
    checksums: dict[tuple[str, int], dict[str, str]]
    """kind of checksum and tensor-parallel size of the server -> the server's parameter name -> checksum"""


async def probe_ids(fleet: Fleet) -> list[int]:
    """Runs of an arbitrary token and its greedy continuation, and then the same runs again.

    Within a run the ids are likely: on likely ids two implementations of the same weights agree closely in bfloat16 too. The runs differ, so
    what attention chooses matters; one run alone may be a single token again and again, and then lost queries and keys change nothing. In the
    repetition they matter most: what followed a token before is predicted again by attention to it.
    """
    first = next(m.engine for m in fleet.members if m.state == "ready")
    random, runs = Random(0), list[int]()
    for _ in range(PROBE_STARTS):
        start = random.randrange(first.vocab_size or 256)
        runs += [start, *await first.api.greedy([start], PROBE_RUN - 1)]
    if first.vocab_size is not None and not ids_below(runs, first.vocab_size):
        raise EngineFailure(
            f"{first.address} continued the probe with ids outside 0..{first.vocab_size - 1}; is its model the trained one?",
            "engine: ids outside the vocabulary",
        )
    return (runs * 2)[: first.context_length - 2]


async def expected_weights(
    trainer: Trainer, fleet: Fleet, probe: Sequence[int], *, adapter: str | None = None
) -> Expected:
    """Compute what verifies the trainer's current weights, or one of several adapters, whose servers have no checksums of it."""
    ids = np.array(probe, np.int32)
    ones, zeros = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
    weights = ones.copy()
    weights[0] = 0
    row = Row(tokens=ids, weights=weights, advantages=zeros, rollout_log_probs=zeros, temperature=ones)
    # one copy of the row for each data-parallel rank: all must take part
    score = trainer.log_probs if adapter is None else partial(trainer.log_probs, adapter=adapter)
    log_probs = (await asyncio.to_thread(score, [row] * trainer.copies))[0]
    checksums: dict[tuple[str, int], dict[str, str]] = {}
    for kind, ranks in {m.engine.api.checksum_kind for m in fleet.members}:
        if kind and adapter is None:
            stages = await asyncio.to_thread(trainer.deliver, "checksums", kind=kind, ranks=ranks)
            checksums[kind, ranks] = {name: value for stage in stages for name, value in stage.items()}
    return Expected(
        ids=tuple(ids.tolist()),
        log_probs=tuple(log_probs[1:].tolist()),
        limit=LIMITS[trainer.dtype],
        checksums=checksums,
    )


async def compare(
    engines: Sequence[SGLangEngine], expected: Expected, *, adapter: str | None = None
) -> tuple[Failures, float | None]:
    """Failures of the engines whose weights differ, or those of one of several adapters, and the largest difference of a log-prob."""
    differences: list[float] = []

    async def check(engine: SGLangEngine) -> None:
        await _check_checksums(engine, expected)
        differences.append(await _check_log_probs(engine, expected, adapter))

    failed = await failures_of(engines, check)
    return failed, max(differences, default=None)


async def _check_checksums(engine: SGLangEngine, expected: Expected) -> None:
    trainers = expected.checksums.get(engine.api.checksum_kind)
    engines = await engine.api.checksums() if trainers else None
    if not trainers or engines is None or engines == trainers:
        return
    differ = sorted(name for name in engines.keys() | trainers.keys() if engines.get(name) != trainers.get(name))
    raise EngineFailure(
        f"{len(differ)} of {len(trainers)} parameters at {engine.address} differ from the trainer's: {', '.join(differ[:3])}",
        "engine: weights differ",
    )


async def _check_log_probs(engine: SGLangEngine, expected: Expected, adapter: str | None) -> float:
    """The largest difference of a log-prob; EngineFailure if the mean difference is above the limit."""
    scores = await engine.api.score(expected.ids, adapter=None if adapter is None else engine.loaded(adapter).name)
    differences = np.abs(np.array(scores) - np.array(expected.log_probs))
    if not differences.mean() <= expected.limit:
        of = "" if adapter is None else f" of the adapter {adapter}"
        raise EngineFailure(
            f"log-probs{of} at {engine.address} differ from the trainer's by {differences.mean():.4f} nats on average; "
            f"expected at most {expected.limit:g} for the same weights",
            "engine: weights differ",
        )
    return float(differences.max())
