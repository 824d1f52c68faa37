"""The order of groups in a run of several environments. The shares are exact: after any number of groups, each has its share to within one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.data.data_source import DataSource
from agentrl.types import EpisodeSpec, Group, Task


class MixedSource:
    """Takes groups from the sources of several environments, by their shares.

    The next group comes from the environment that lacks the most: of n groups, environment e should have share_e × n.

    Args:
        sources: the source of each environment, by its label.
        shares: the share of each; they sum to 1.
    """

    def __init__(self, sources: Mapping[str, DataSource], shares: Mapping[str, float]) -> None:
        self.sources, self.shares = dict(sources), dict(shares)
        self.issued = dict.fromkeys(sources, 0)
        """groups issued so far, by environment, less those that were given back"""
        self.next_group = self.next_episode = 0

    @property
    def tasks(self) -> list[Task]:
        """The tasks of all environments."""
        return [task for source in self.sources.values() for task in source.tasks]

    def get_samples(self, num_groups: int) -> list[list[EpisodeSpec]]:
        """Return the next groups. Groups and episodes are numbered over all environments."""
        groups = []
        for _ in range(num_groups):
            number = sum(self.issued.values()) + 1
            env = max(self.sources, key=lambda e: self.shares[e] * number - self.issued[e])
            self.issued[env] += 1
            (specs,) = self.sources[env].get_samples(1)
            groups.append(
                [
                    replace(spec, env=env, group_index=self.next_group, index=self.next_episode + i)
                    for i, spec in enumerate(specs)
                ]
            )
            self.next_group += 1
            self.next_episode += len(specs)
        return groups

    def add_samples(self, groups: Sequence[Sequence[EpisodeSpec]]) -> None:
        """Give tasks back, which their environments play again as new groups before any others."""
        for specs in groups:
            self.issued[specs[0].env] -= 1
            self.sources[specs[0].env].add_samples([specs])

    def add_results(self, groups: Sequence[Group]) -> None:
        """Give each environment's source the groups that are its own."""
        for env, source in self.sources.items():
            source.add_results([g for g in groups if g.trajectories[0].env == env])

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all sources, for a checkpoint."""
        sources = {env: source.state_dict() for env, source in self.sources.items()}
        numbers = {"next_group": self.next_group, "next_episode": self.next_episode}
        return {"sources": sources, "issued": dict(self.issued), **numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned.

        Raises:
            DataError: the tasks of an environment differ from those of the checkpoint.
        """
        for env, source in self.sources.items():
            source.load_state_dict(state["sources"][env])
        self.issued, self.next_episode = dict(state["issued"]), state["next_episode"]
        self.next_group = state.get("next_group", sum(self.issued.values()))
