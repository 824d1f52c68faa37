"""DataSource: issues groups of episodes in an order that follows from the seed, and resumes exactly where it stood."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from agentrl.errors import DataError
from agentrl.seeds import derive_seed
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            DataError: the data has another number of tasks than when the state was saved.
        """
        if state["tasks"] != len(self.tasks):
            raise DataError(
                f"the checkpoint was made with {state['tasks']} tasks, the data now has {len(self.tasks)}; resume with the same data"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self.next_group, self.next_episode = state["next_group"], state["next_episode"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.tasks)))
        if self.shuffle:
            Random(derive_seed(self.seed, "data", self.epoch)).shuffle(order)
        return order
