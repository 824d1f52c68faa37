"""Tasks chosen by how often they are solved: `--data-source-path solve_rate`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.data.data_source import DataSource
from agentrl.types import Group, Task

SOLVED = 0.5
"""An episode with a higher score solves its task, as in pass@k."""
NEWEST = 0.5
"""weight of the newest group in a task's solve rate"""
LEAST = 0.02
"""smallest weight of a task, so that what was never or always solved comes back"""


class SolveRateSource(DataSource):
    """Draws tasks at random, with weights p (1 − p) by their recent solve rate p.

    p (1 − p) is the variance of a success, which is what a group can learn from: it is 0 for a task that is always or never solved (learnability,
    Foster et al. 2025, arXiv:2502.12272). A task that was not played yet has p = ½. Tasks that were drawn since the last results are not drawn
    again before all others were. The draws follow from the seed and the results, so a resumed run continues them exactly.
    """

    def __init__(self, tasks: Sequence[Task], *, n_samples_per_prompt: int, seed: int, shuffle: bool = True) -> None:
        super().__init__(tasks, n_samples_per_prompt=n_samples_per_prompt, seed=seed, shuffle=shuffle)
        self.rates: dict[str, float] = {}
        """recent solve rate by task id; a task without one was not played yet"""
        self.drawn: set[str] = set()
        """ids of the tasks drawn since the last results"""

    def add_results(self, groups: Sequence[Group]) -> None:
        """Update the solve rates of the tasks that were played."""
        self.drawn.clear()
        for group in groups:
            solved = fmean(t.score > SOLVED for t in group.trajectories)
            before = self.rates.get(group.task.id)
            self.rates[group.task.id] = solved if before is None else NEWEST * solved + (1 - NEWEST) * before

    def weight(self, task_id: str) -> float:
        """The weight of a task."""
        rate = self.rates.get(task_id, 0.5)
        return max(rate * (1 - rate), LEAST)

    def state_dict(self) -> dict[str, Any]:
        """See `DataSource.state_dict`."""
        return {**super().state_dict(), "rates": dict(self.rates), "drawn": sorted(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `DataSource.load_state_dict`."""
        super().load_state_dict(state)
        self.rates, self.drawn = dict(state["rates"]), set(state["drawn"])

    def next_task(self) -> Task:
        """See `DataSource.next_task`."""
        open_tasks = [task for task in self.tasks if task.id not in self.drawn]
        if not open_tasks:
            self.drawn.clear()
            open_tasks = self.tasks
        random = Random(derive_seed(self.seed, "curriculum", self.next_group))
        (task,) = random.choices(open_tasks, [self.weight(task.id) for task in open_tasks])
        self.drawn.add(task.id)
        return task
