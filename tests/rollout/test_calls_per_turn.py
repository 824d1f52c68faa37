"""What a turn costs, counted in calls of Python functions: the same on every machine and at any load, unlike time."""

import asyncio
import sys

from doubles import call, make_runner

from agentrl import ToolEnv, tool
from agentrl.types import EpisodeSpec, Task

CALLS_PER_TURN = 340 if sys.version_info[:2] == (3, 11) else 400
"""of Python functions, asyncio's and the test engine's included; measured with Python 3.11: 327. One `isinstance` of a runtime protocol takes ten"""


class Look(ToolEnv):
    """One tool."""

    @tool
    async def search(self, query: str) -> str:
        """Search.

        Args:
            query: what to search for
        """
        return "found"


async def calls_of(renderer, turns):
    """Calls of Python functions in one episode of so many turns."""
    runner = make_runner(Look, [*[call("search", query="x")] * (turns - 1), "done"], renderer, max_turns=turns)
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    task = asyncio.ensure_future(runner.run(EpisodeSpec(Task("t", "x"), 0, 0)))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        trajectory = await task
    finally:
        sys.setprofile(before)
        runner.close()
    assert len(trajectory.turns) == turns
    return count


async def test_a_turn_makes_few_calls(hermes):
    await calls_of(hermes, 4)  # what is made once
    few, many = await calls_of(hermes, 4), await calls_of(hermes, 20)
    assert (many - few) / 16 < CALLS_PER_TURN
