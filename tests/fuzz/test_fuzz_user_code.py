"""What user code returns, mutated: the episode is recorded as it was played, or fails with a cause; never a traceback, never a changed number."""

import asyncio
import json
import math
from random import Random

import pytest
from doubles import call, make_runner

from agentrl import Env, StepResult, Tool, tool
from agentrl.errors import UsageError
from agentrl.reward import Reward
from agentrl.store import encode, from_record, to_record
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Status, Task
from fuzz.mutations import FULL, QUICK, mutated, odd


class Raises:
    """Its text and its length raise."""

    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __len__ = __iter__ = __bool__ = __float__ = __repr__


class Silent(Exception):
    def __str__(self):
        raise ValueError("no text")


MESSAGES = [
    {"role": "user", "content": "go on"},
    {"role": "tool", "name": "x", "content": [{"type": "text", "text": "y"}]},
]
RAISED = (
    Silent,
    SystemExit,
    KeyError,
    RecursionError,
    StopIteration,
    asyncio.CancelledError,
    GeneratorExit,
    UnicodeError,
    MemoryError,
)


def value(random: Random):
    kind = random.randrange(8)
    if kind == 0:
        return Raises()
    if kind == 1:
        raise random.choice(RAISED)()
    if kind == 2:
        return mutated(MESSAGES, random)
    if kind == 3:
        return MESSAGES
    return odd(random)


class Odd(Env):
    """One of its answers is odd."""

    timeout_s = 5.0

    def __init__(self, seed):
        self.random, self.where = Random(seed), Random(seed).choice(PLACES)
        self.steps = 0

    def at(self, place, usual):
        return value(self.random) if place == self.where else usual

    def reset(self, task, *, seed):
        return self.at("reset", "begin")

    def step(self, action):
        self.steps += 1
        if self.where == "step":
            return value(self.random)
        fields = {
            "observation": self.at("observation", "go on"),
            "reward": self.at("reward", 0.25),
            "terminated": self.at("terminated", self.steps == 3),
            "truncated": self.at("truncated", False),
            "info": self.at("info", {"x": 1}),
            "state_key": self.at("state_key", "s"),
        }
        return StepResult(**fields)

    def state(self):
        return self.at("state", {"seed": 1})

    def close(self):
        return self.at("close", None)

    @tool(timeout_s=5.0, retries=0)
    def look(self, query: str):
        """Look."""
        return self.at("tool", "seen")


PLACES = (
    "reset",
    "step",
    "observation",
    "reward",
    "terminated",
    "truncated",
    "info",
    "state_key",
    "state",
    "close",
    "tool",
    "score",
    "group",
)


async def played(seed, renderer):
    place = Random(seed).choice(PLACES)

    def score(trajectory):
        return value(Random(seed)) if place == "score" else 1.0

    rewards = [Reward(score, "score", timeout_s=5.0)]
    runner = make_runner(
        Odd,
        [call("look", query="q"), "text", "text"],
        renderer,
        env_args={"seed": seed},
        rewards=rewards,
        max_turns=4,
    )
    try:
        async with asyncio.timeout(60):
            return await runner.run(EpisodeSpec(Task("t", "Go on.", "label"), 0, 0))
    finally:
        runner.close()
        runner.scorer.close()


@pytest.mark.parametrize("cases", [QUICK, pytest.param(FULL, marks=pytest.mark.full)])
async def test_an_odd_value_is_recorded_or_fails_its_episode(hermes, cases):
    ended, sentences = set(), []
    for seed in range(cases):
        try:
            t = await played(seed, hermes)
        except UsageError as e:
            sentences.append(str(e))
            continue
        ended.add(t.stop_reason)
        line = encode(to_record(t))
        again = from_record(json.loads(line))
        assert again.score == t.score, seed
        assert [s.spans for s in again.segments] == [s.spans for s in t.segments], seed
        assert math.isfinite(t.score), seed
        if t.status is Status.FAILED:
            assert t.cause, seed
            assert to_samples(t) == [], seed
        else:
            assert t.score == sum(turn.reward for turn in t.turns) + sum(v or 0.0 for v in t.rewards.values()), seed
    assert len(ended) > 3
    assert all(s and "\n" not in s for s in sentences), sentences


async def test_an_exception_in_a_tool_objects_setup_fails_the_episode(hermes):
    class Bad(Tool):
        def setup(self, seed):
            raise Silent

        def call(self, x: str) -> str:
            """Do."""
            return x

    class Uses(Env):
        tools = (Bad,)

        def step(self, action):
            return StepResult(terminated=True)

    runner = make_runner(Uses, ["x"], hermes)
    t = await runner.run(EpisodeSpec(Task("t", "Go."), 0, 0))
    runner.close()
    assert (t.status, t.cause) == (Status.FAILED, "tool setup: Silent")
