"""DataSource: issues groups of episodes in an order that follows from the seed, and resumes exactly where it stood."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import Any
from zlib import crc32

from agentrl.core.seeds import derive_seed
from agentrl.errors import DataError
from agentrl.types import EpisodeSpec, Task


class DataSource:
    """Epoch after epoch over the tasks, shuffled anew each time. Names follow slime's (`get_samples`)."""

    def __init__(self, tasks: Sequence[Task], *, n_samples_per_prompt: int, seed: int, shuffle: bool = True) -> None:
        """Begin at the first epoch.

        Raises:
            DataError: no tasks.
        """
        if not tasks:
            raise DataError("there are no tasks to train on")
        self.tasks = list(tasks)
        self.n_samples_per_prompt = n_samples_per_prompt
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        """in the epoch's order"""
        self.next_group = 0
        self.next_episode = 0
        self._order = self._shuffled()

    def get_samples(self, num_groups: int) -> list[list[EpisodeSpec]]:
        """The next groups, each of `n_samples_per_prompt` episodes of one task, with ordinals never given before."""
        groups = []
        for _ in range(num_groups):
            task = self.tasks[self._order[self.position]]
            n = self.n_samples_per_prompt
            groups.append([EpisodeSpec(task, self.next_group, self.next_episode + i) for i in range(n)])
            self.next_group += 1
            self.next_episode += n
            self.position += 1
            if self.position == len(self.tasks):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "next_group": self.next_group,
            "next_episode": self.next_episode,
            "tasks": len(self.tasks),
            "checksum": self._checksum,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            DataError: the data is another than when the state was saved.
        """
        if state["tasks"] != len(self.tasks):
            raise DataError(
                f"the checkpoint was made with {state['tasks']} tasks, the data now has {len(self.tasks)}; resume with the same data"
            )
        if state.get("checksum", self._checksum) != self._checksum:
            raise DataError(
                "the data has other tasks than those the checkpoint was made with; resume with the same data"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self.next_group, self.next_episode = state["next_group"], state["next_episode"]
        self._order = self._shuffled()

    @cached_property
    def _checksum(self) -> int:
        """Of ids, prompts and labels; of what JSON has no word for only the type, since its repr may differ from process to process."""
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
