"""Two environments on the facts of search_r1, and one of two roles, for test_adapters_run.py."""

from itertools import islice

from agentrl import Env, StepResult, Task
from agentrl.envs.search_r1 import SearchR1
from agentrl.types import Observation


class Asking(SearchR1):
    """search_r1 under another name."""

    name = "Asking"


class Reading(SearchR1):
    """search_r1 whose score is turned round, so that its adapter learns something else."""

    name = "Reading"

    rewards = ("em=-1.0",)


class Pair(Env):
    """The first speaks, then the second; each scores its number of letters a."""

    roles = ("first", "second")
    action_format = "search_r1"

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{task.id}", task.prompt) for task in islice(SearchR1.tasks("train"), 4)]

    def reset(self, task, *, seed):
        self.turns, self.prompt = 0, task.prompt
        return task.prompt

    def step(self, action):
        self.turns += 1
        reward = float(action.text.count("a"))
        return StepResult(Observation.of(self.prompt, to="second"), reward=reward, terminated=self.turns == 2)
