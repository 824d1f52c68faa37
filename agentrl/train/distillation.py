"""On-policy distillation: teachers score the tokens that the policy sampled.

The reverse KL of a token, log π − log π_teacher, is subtracted from its advantage: Agarwal et al. 2024 (On-policy distillation of language models,
arXiv:2306.13649) with the policy gradient of Lu et al. 2025 (On-policy distillation, Thinking Machines). log π is the engine's, of the policy
that sampled the token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from agentrl.errors import DataError, InvariantError, suggest
from agentrl.train.base import Floats, Row
from agentrl.types import Task

METADATA_KEY = "teacher"
"""key of a task's metadata that names its teacher"""
CONCURRENCY = 16
"""rows that a teacher scores at the same time"""


class Teacher(Protocol):
    """A model that scores token ids."""

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Log-probs of ids[1:], each given the ids before it, at temperature 1."""

    async def close(self) -> None:
        """Free its resources."""


class Teachers:
    """The teachers of a run by name.

    A task whose metadata names a teacher is scored by it. Other tasks are scored by all teachers, whose log-probs are averaged: the sum of the
    divergences to several teachers has that gradient.
    """

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self._teachers = dict(teachers)
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def check(self, task: Task) -> None:
        """Refuse a task whose teacher is unknown.

        Raises:
            DataError: no teacher has that name.
        """
        name = task.metadata.get(METADATA_KEY)
        if name is not None and name not in self._teachers:
            raise DataError(
                f"task {task.id!r} names the teacher {name!r}, which is none of --opd-teacher: {', '.join(self._teachers)}"
                f"{suggest(str(name), self._teachers)}"
            )

    async def log_probs(self, rows: Sequence[Row], tasks: Mapping[str, Task]) -> list[Floats]:
        """Per-token log-probs of rows by their teachers; 0 where a token is not trained. `tasks` by episode id.

        Raises:
            DataError: a task names an unknown teacher.
            EngineFailure: a server did not answer.
        """
        return list(await asyncio.gather(*(self._row(row, tasks[row.source[0]]) for row in rows)))

    async def _row(self, row: Row, task: Task) -> Floats:
        self.check(task)
        name = task.metadata.get(METADATA_KEY)
        used = list(self._teachers.values()) if name is None else [self._teachers[name]]
        ids = row.tokens.tolist()
        async with self._slots:
            scores = [await teacher.score(ids) for teacher in used]
        if any(len(s) != len(ids) - 1 for s in scores):
            raise InvariantError(f"a teacher returned {[len(s) for s in scores]} log-probs of {len(ids) - 1} tokens")
        mean = np.concatenate([[0.0], np.mean(np.array(scores, np.float64), axis=0)])
        return np.where(row.weights != 0, mean, 0.0).astype(np.float32)

    async def close(self) -> None:
        """Close all teachers."""
        for teacher in self._teachers.values():
            await teacher.close()
