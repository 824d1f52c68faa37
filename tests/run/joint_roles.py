"""An environment of two roles for test_joints.py, and players of them."""

from agentrl import Env, StepResult, Task
from agentrl.types import Observation


def echo(messages, *, seed):
    return "is 1"


class Pair(Env):
    """The first asks, the second answers; each scores 1 with a 1."""

    roles = ("first", "second")
    action_format = "hermes"

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}{i}", "Begin.") for i in range(2)]

    def reset(self, task, *, seed):
        self.turns = 0
        return "Begin."

    def step(self, action):
        self.turns += 1
        reward = float("1" in action.text)
        return StepResult(Observation.of("Your turn.", to="second"), reward=reward, terminated=self.turns == 2)
