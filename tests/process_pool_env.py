"""An environment for tests of runner processes, which import it by its file; with arguments it does what ends or stops a process."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from agentrl import Env, Observation, StepResult, Task, ToolEnv, reward, tool
from agentrl.errors import InfraError


@reward
def letters(trajectory):
    return trajectory.state["seed"] % 7 + len(trajectory.turns)


@reward(group=True, weight=0.5)
def rank(trajectories):
    return [float(i) for i, _ in enumerate(trajectories)]


class Walk(ToolEnv):
    action_format = "search_r1"
    rewards = (letters, rank)
    running = 0

    def __init__(self, flag: str = "", does: str = "", where: str = "2"):
        self.flag, self.does, self.where = Path(flag), does, where.split()

    @classmethod
    def tasks(cls, split):
        return [Task(str(n), f"What is {n}?", n, {"n": n}) for n in range(8)]

    async def reset(self, task, *, seed):
        self.seed, self.task = seed, task
        return await super().reset(task, seed=seed)

    def state(self):
        state = {"seed": self.seed, "n": self.task.metadata["n"], "pid": os.getpid() if self.does == "pid" else 0}
        return state | ({"starts": multiprocessing.get_start_method()} if self.does == "pid" else {})

    @tool(max_concurrency=4)
    async def search(self, query: str) -> str:
        """Look something up."""
        if self.task.id in self.where and self.does:
            await getattr(self, f"_{self.does}")()
        return f"found {query} {self.seed % 97}"

    async def step(self, action):
        result = await super().step(action)
        self.lock = threading.Lock()
        if self.does == "odd" and self.task.id in self.where:
            return StepResult(result.observation, 0.0, True, info={"lock": self.lock})
        return result

    async def _pid(self): ...
    async def _odd(self): ...

    async def _kill_once(self):
        """Only the first process that comes here dies."""
        if self._first():
            os.kill(os.getpid(), signal.SIGKILL)

    async def _exit(self):
        os._exit(3)

    async def _block_once(self):
        if self._first():
            time.sleep(3600)  # noqa: ASYNC251  what a person might do

    async def _infra(self):
        raise InfraError("the index is away")

    async def _contract(self):
        self.seed = await asyncio.sleep(0, "x")
        self.step = lambda action: "no StepResult"

    def _first(self) -> bool:
        try:
            self.flag.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def guest(messages, *, seed):
    """What a guest says: text that follows from the seed."""
    return f"guest {seed % 1000}"


class Talk(Env):
    """Two hosts of the policy and a guest who is played by text take turns."""

    roles = ("first", "guest", "second")
    players = {"guest": guest}
    action_format = "search_r1"
    rewards = (letters, rank)

    @classmethod
    def tasks(cls, split):
        return [Task(str(n), f"What is {n}?", n) for n in range(8)]

    def reset(self, task, *, seed):
        self.seed, self.said = seed, []
        return "Begin."

    def step(self, action):
        self.said.append(action.text)
        observation = Observation.of(f"They said {action.text}", to=self.roles[len(self.said) % 3])
        return StepResult(observation, reward=len(action.text) % 5, terminated=len(self.said) == 7)

    def state(self):
        return {"seed": self.seed, "said": self.said}
