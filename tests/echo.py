"""Environments and helpers that the tests of one episode share."""

import asyncio

from agentrl import Env, StepResult, ToolEnv, reward, tool
from agentrl.types import Provenance

OBSERVED = Provenance.OBSERVATION


class Echo(Env):
    """Counts what it is asked; goes on until `ends` steps were made (None: for ever)."""

    made = []
    timeout_s = 5.0

    def __init__(self, ends=None, observation="go on"):
        self.ends, self.observation = ends, observation
        self.steps = self.closed = 0
        self.actions = []
        Echo.made.append(self)

    async def step(self, action):
        self.steps += 1
        self.actions.append(action)
        return StepResult(self.observation, reward=0.25, terminated=self.steps == self.ends, state_key=str(self.steps))

    async def close(self):
        self.closed += 1


class Slow(Echo):
    async def step(self, action):
        await asyncio.sleep(30)


class Search(ToolEnv):
    action_format = "search_r1"

    @tool
    def search(self, query: str) -> str:
        """Look something up."""
        return f"about {query}"


@reward
def is_paris(trajectory):
    return float(trajectory.answer == trajectory.label)


def text(t, tokenizer):
    return [tokenizer.decode(g.ids) for g in t.segments]
