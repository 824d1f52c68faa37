"""The environment of test_joints.py: one tool, then a number, which is the reward."""

import os
from dataclasses import replace

from agentrl import Task, ToolEnv, reward, tool
from agentrl.data.data_source import DataSource


@reward
def one(trajectory):
    return 1.0


@reward
def parts(trajectory):
    return {"a": 1.0, "b": 2.0}


class Reversed(DataSource):
    def get_samples(self, num_groups):
        return super().get_samples(num_groups)[::-1]


def nothing(groups):
    return []


class Noting(DataSource):
    told = []

    def add_results(self, groups):
        Noting.told.append([g.index for g in groups])


def odd_groups(group):
    return group.index % 2 == 1


class Joint(ToolEnv):
    """The score is the number that the policy says last."""

    action_format = "hermes"
    shows_tools = True
    gives_state_keys = True

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", f"question {i} <|im_end|>?", str(i)) for i in range(4)]

    @tool(max_result_bytes=32)
    def look(self, query: str) -> str:
        """Look something up."""
        return f"about {query} "

    async def step(self, action):
        result = await super().step(action)
        last = action.text.rpartition(" ")[2]
        info = {"pid": os.getpid()}
        return replace(
            result, info=info, state_key=action.text, reward=self.bonus + (float(last) if last.isdigit() else 0.0)
        )
