"""The order in which groups of episodes are run. It is derived from the seed, and a resumed run continues it exactly."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import Any
from zlib import crc32

from agentrl.core.registry import Registry
from agentrl.core.seeds import derive_seed
from agentrl.errors import ContractError, DataError
from agentrl.types import EpisodeSpec, Group, Task


class DataSource:
    """Iterates over the tasks, epoch after epoch, in a new random order each time. The method names are slime's.

    A subclass may choose other tasks; give it with --data-source-path. Its state must be JSON values.
    """

    def __init__(self, tasks: Sequence[Task], *, n_samples_per_prompt: int, seed: int, shuffle: bool = True) -> None:
        """Start with the first epoch.

        Raises:
            DataError: there are no tasks.
        """
        if not tasks:
            raise DataError("there are no tasks to train on")
        self.tasks = list(tasks)
        self.n_samples_per_prompt = n_samples_per_prompt
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        """index of the next task in the order of this epoch"""
        self.returned: deque[list[EpisodeSpec]] = deque()
        """groups that were given back and not issued yet"""
        self.next_group = 0
        self.next_episode = 0
        self._order = self._shuffled()

    def get_samples(self, num_groups: int) -> list[list[EpisodeSpec]]:
        """Return the next groups: first those that `add_samples` gave back, then new ones.

        A new group has `n_samples_per_prompt` episodes of one task; every episode has a new index.
        """
        groups = [self.returned.popleft() for _ in range(min(num_groups, len(self.returned)))]
        while len(groups) < num_groups:
            task, size = self.next_task(), self.n_samples_per_prompt
            groups.append([EpisodeSpec(task, self.next_group, self.next_episode + i) for i in range(size)])
            self.next_group += 1
            self.next_episode += size
        return groups

    def next_task(self) -> Task:
        """Return the task of group `next_group`, a new one. A subclass that only chooses other tasks overrides this."""
        task = self.tasks[self._order[self.position]]
        self.position += 1
        if self.position == len(self.tasks):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        return task

    def add_samples(self, groups: Sequence[Sequence[EpisodeSpec]]) -> None:
        """Give tasks back, which will be played again as new groups before any others, in the same order."""
        for specs in groups:
            first = self.next_episode
            self.returned.append([EpisodeSpec(spec.task, self.next_group, first + i) for i, spec in enumerate(specs)])
            self.next_group += 1
            self.next_episode += len(specs)

    def add_results(self, groups: Sequence[Group]) -> None:
        """Called after each rollout with its groups, in a run with `--schedule sync`. The default ignores them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "next_group": self.next_group,
            "next_episode": self.next_episode,
            "tasks": len(self.tasks),
            "checksum": self._checksum,
            **({"returned": [_ordinals(group) for group in self.returned]} if self.returned else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned.

        Raises:
            DataError: the tasks differ from those of the checkpoint.
        """
        if state["tasks"] != len(self.tasks):
            raise DataError(
                f"the checkpoint was made with {state['tasks']} tasks, the data now has {len(self.tasks)}; resume with the same data"
            )
        if state.get("checksum", self._checksum) != self._checksum:
            raise DataError("the tasks differ from those that the checkpoint was made with; resume with the same data")
        self.epoch, self.position = state["epoch"], state["position"]
        self.next_group, self.next_episode = state["next_group"], state["next_episode"]
        self._order = self._shuffled()
        by_id = {task.id: task for task in self.tasks}
        self.returned = deque(
            [EpisodeSpec(by_id[name], group, index) for index in indices]
            for name, group, indices in state.get("returned", ())
        )

    @cached_property
    def _checksum(self) -> int:
        """CRC-32 of ids, prompts and labels. A value that is not JSON counts by its type, because its repr may differ between processes."""
        total = 0
        for task in self.tasks:
            text = json.dumps(
                (task.id, task.prompt, task.label), default=lambda value: type(value).__name__, skipkeys=True
            )
            total = crc32(text.encode(), total)
        return total

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.tasks)))
        if self.shuffle:
            Random(derive_seed(self.seed, "data", self.epoch)).shuffle(order)
        return order


def _ordinals(group: Sequence[EpisodeSpec]) -> tuple[str, int, list[int]]:
    """Task id, index of the group and indices of its episodes, for a checkpoint."""
    return group[0].task.id, group[0].group_index, [spec.index for spec in group]


DATA_SOURCES = Registry(
    "data source",
    {
        "shuffled": "agentrl.data.data_source:DataSource",
        "solve_rate": "agentrl.data.curriculum:SolveRateSource",
    },
)
"""data sources by name"""


def resolve_data_source(name: str | None) -> type[DataSource]:
    """The class behind `--data-source-path`.

    Raises:
        UnknownNameError, ConfigError, ContractError: unknown, not importable, or not a subclass of DataSource.
    """
    chosen: Any = DATA_SOURCES.resolve(name or "shuffled")
    if not (isinstance(chosen, type) and issubclass(chosen, DataSource)):
        raise ContractError(f"--data-source-path {name}: expected a subclass of DataSource, found {chosen!r:.80}")
    return chosen
