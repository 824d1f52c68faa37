"""The groups in a checkpoint: each returns to its own environment, and a damaged file is refused."""

import pytest

from agentrl import Task
from agentrl.errors import DataError, StoreError
from agentrl.rollout.failures import CauseTable
from agentrl.run.group_buffer import read_buffer, write_buffer
from agentrl.run.group_player import PlayedGroup
from agentrl.types import EpisodeSpec

TASKS = {"a": [Task("same", "of a")], "b": [Task("same", "of b")]}


def spec(env, index):
    return EpisodeSpec(TASKS[env][0], 5, index, env=env)


def test_groups_return_to_their_environments_with_their_causes():
    specs = {3: [spec("b", 6), spec("b", 7)], 4: [spec("a", 8)]}
    causes = CauseTable(retried=2, dropped_groups=1)
    causes.counts["env_failure", "gone"] = 3
    content = write_buffer(specs, {4: PlayedGroup(group=None, causes=causes)})
    read, outcomes = read_buffer(content, TASKS, "here")
    assert read == specs
    assert outcomes == {4: PlayedGroup(group=None, causes=causes)}


def test_a_task_that_is_gone_and_a_damaged_file_are_refused():
    content = write_buffer({0: [spec("a", 0)]}, {})
    with pytest.raises(DataError, match="task 'same' is not in the data any more"):
        read_buffer(content, {"b": TASKS["b"]}, "here")
    with pytest.raises(StoreError, match="here"):
        read_buffer(content[:-10], TASKS, "here")
