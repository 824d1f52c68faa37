"""A tool's calls start at most so often per second, over all episodes and processes; attempts after a failure count too."""

import asyncio
import time

import pytest
from tool_calls import specs

from agentrl.core.rate_limit import RateLimit
from agentrl.errors import ContractError, InfraError
from agentrl.rollout.tool_executor import ToolExecutor
from agentrl.tool import ToolLimits, tool
from agentrl.types import Action, ToolCall


def rated(per_second, fails=0, **limits):
    """A tool that notes when its calls start, and the notes."""
    times = []

    @tool(max_per_second=per_second, **limits)
    async def ask(n: int) -> str:
        """Ask."""
        times.append(time.perf_counter())
        if len(times) <= fails:
            raise InfraError("busy")
        return str(n)

    return ask, times


async def play(tool_executor, fn, episodes):
    actions = [Action("x", (ToolCall("ask", {"n": n}, f"c{n}"),)) for n in range(episodes)]
    return await asyncio.gather(*(tool_executor.execute(specs(fn), a) for a in actions))


async def test_calls_of_all_episodes_share_the_rate_in_order(tool_executor):
    ask, times = rated(50)
    done = await play(tool_executor, ask, 6)
    assert [a.results[0].content for a in done] == [str(n) for n in range(6)]
    assert times[-1] - times[0] >= 5 / 50 - 0.01


async def test_the_wait_is_not_part_of_the_time_limit(tool_executor):
    ask, times = rated(10, timeout_s=0.15)
    done = await play(tool_executor, ask, 4)
    assert not any(a.results[0].is_error for a in done)
    assert times[-1] - times[0] >= 0.29


async def test_further_attempts_count(tool_executor):
    ask, times = rated(20, fails=1)
    await play(tool_executor, ask, 1)
    assert times[1] - times[0] >= 0.04


async def test_processes_share_the_rate():
    ask, times = rated(50)
    await play(ToolExecutor(processes=2), ask, 3)
    assert times[-1] - times[0] >= 2 / 25 - 0.01


async def test_without_a_limit_nothing_waits():
    rate = RateLimit(None)
    await asyncio.gather(*(rate.wait() for _ in range(1000)))
    assert rate._next == 0.0


@pytest.mark.parametrize("rate", [0, -1, float("inf"), "5", True])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ContractError, match="max_per_second must be a positive number"):
        ToolLimits(max_per_second=rate)
