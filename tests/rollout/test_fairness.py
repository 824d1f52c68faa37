"""Back-pressure and fairness of a rollout: bounds hold, a slow tool delays only its callers, order is kept."""

import asyncio
import threading
import time

import pytest
from doubles import PARIS, FakeGenerator, call, groups_of, make_runner, until

from agentrl import Env, StepResult, ToolEnv, tool
from agentrl.errors import EngineFailure
from agentrl.reward import Reward
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.types import EpisodeSpec

SOON_S = 10


def index_of(request):
    return int(request.session.partition("-")[0])


class Desk(ToolEnv):
    """Counts its instances between `reset` and `close`."""

    alive = most = 0

    async def reset(self, task, *, seed):
        Desk.alive += 1
        Desk.most = max(Desk.most, Desk.alive)
        return await super().reset(task, seed=seed)

    async def close(self):
        Desk.alive -= 1


@pytest.fixture(autouse=True)
def _fresh():
    Desk.alive = Desk.most = 0


async def test_episodes_start_in_the_order_in_which_they_were_issued(hermes):
    async def script(request):
        await asyncio.sleep(request.random.random() / 200)
        return "x"

    engine = FakeGenerator(hermes, script)
    await Rollout(make_runner(Desk, engine, hermes), RolloutLimits(concurrency=4)).run(groups_of(6, 4))
    assert [index_of(r) for r in engine.requests if r.turn == 0] == list(range(24))


async def test_a_failed_episode_is_started_again_after_the_waiting_ones(hermes):
    engine = FakeGenerator(hermes, lambda r: EngineFailure("503") if r.session == "0-0" else "x")
    await Rollout(make_runner(Desk, engine, hermes), RolloutLimits(concurrency=1)).run(groups_of(1, 6))
    assert [r.session for r in engine.requests] == ["0-0", "1-0", "2-0", "3-0", "4-0", "5-0", "0-1"]


async def test_a_slow_reward_delays_new_episodes(hermes):
    """Finished ones that wait to be scored count among `concurrency`, with those that run: they cannot pile up."""
    gate, scoring = asyncio.Event(), []

    async def slow(trajectory):
        scoring.append(trajectory.index)
        await gate.wait()
        return 1.0

    engine = FakeGenerator(hermes, ["x"])
    runner = make_runner(Desk, engine, hermes, rewards=[Reward(slow, "slow")])
    running = asyncio.create_task(Rollout(runner, RolloutLimits(concurrency=3)).run(groups_of(4, 4)))
    await until(lambda: len(scoring) == 3)
    for _ in range(100):
        await asyncio.sleep(0)
    assert (scoring, len(engine.requests), Desk.alive) == ([0, 1, 2], 3, 0)
    gate.set()
    groups, _ = await asyncio.wait_for(running, SOON_S)
    assert sum(len(g.trajectories) for g in groups) == 16
    assert Desk.most <= 3


async def test_a_slow_progress_callback_limits_the_episodes_in_flight(hermes):
    """`progress` is called where the episode ends, so no result waits for it in a queue."""
    engine, heard = FakeGenerator(hermes, ["x"]), []

    def progress(trajectory):
        heard.append(len(engine.requests) - len(heard))  # begun and not yet heard of

    await Rollout(make_runner(Desk, engine, hermes), RolloutLimits(concurrency=5)).run(groups_of(10, 4), progress)
    assert len(heard) == 40
    assert max(heard) <= 5


class Kitchen(Desk):
    """A slow tool of which one call runs at a time, and a quick one."""

    gate = None
    order = []

    @tool(max_concurrency=1)
    async def stew(self, n: int) -> str:
        """Takes long."""
        Kitchen.order.append(n)
        await Kitchen.gate.wait()
        return "done"

    @tool(max_concurrency=2)
    async def snack(self, n: int) -> str:
        """Is quick."""
        return "done"


class Block(Kitchen):
    """The same with tools that block their thread."""

    @tool(max_concurrency=1)
    def stew(self, n: int) -> str:
        """Takes long."""
        Kitchen.order.append(n)
        Kitchen.gate.wait(SOON_S)
        return "done"

    @tool(max_concurrency=2)
    def snack(self, n: int) -> str:
        """Is quick."""
        return "done"


@pytest.mark.parametrize(("env", "gate"), [(Kitchen, asyncio.Event), (Block, threading.Event)])
async def test_a_slow_tool_delays_only_the_episodes_that_call_it(hermes, env, gate):
    Kitchen.gate, Kitchen.order = gate(), []
    script = lambda r: "x" if r.turn else call("stew" if index_of(r) < 4 else "snack", n=index_of(r))  # noqa: E731
    runner, heard = make_runner(env, script, hermes), []
    rollout = Rollout(runner, RolloutLimits(concurrency=8))
    running = asyncio.create_task(rollout.run(groups_of(6, 4), lambda t: heard.append(t.index)))
    await until(lambda: len(heard) == 20)
    assert sorted(heard) == list(range(4, 24))
    assert Kitchen.order == [0], "the others wait for their turn"
    Kitchen.gate.set()
    await asyncio.wait_for(running, SOON_S)
    assert Kitchen.order == [0, 1, 2, 3], "and have it in the order in which they came"
    assert sorted(heard) == list(range(24))
    runner.close()


async def test_slow_environments_share_their_threads_and_delay_no_others(hermes):
    """Sync methods have as many threads as the environment says; async ones of the same environment need none."""
    gate, at_once = threading.Event(), []

    class Half(Desk):
        threads = 2

        def step(self, action):
            at_once.append(1)
            gate.wait(SOON_S)
            return ToolEnv.step(self, action)

    engine = FakeGenerator(hermes, ["x"])
    slow, quick = make_runner(Half, engine, hermes), make_runner(Desk, FakeGenerator(hermes, ["x"]), hermes)
    held = asyncio.create_task(Rollout(slow, RolloutLimits(concurrency=6)).run(groups_of(2, 3)))
    await until(lambda: len(at_once) == 2)
    groups, _ = await asyncio.wait_for(Rollout(quick, RolloutLimits()).run(groups_of(3, 3)), SOON_S)
    assert len(groups) == 3
    assert len(at_once) == 2
    gate.set()
    await asyncio.wait_for(held, SOON_S)
    assert len(at_once) == 6
    slow.close()
    quick.close()


async def test_an_observation_of_megabytes_does_not_block_the_event_loop(hermes):
    class Flood(Env):
        async def step(self, action):
            return StepResult("one two three " * 200_000)

    gaps = []

    async def clock():
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    ticking = asyncio.create_task(clock())
    t = await make_runner(Flood, ["x"], hermes, max_turns=3).run(EpisodeSpec(PARIS, 0, 0))
    ticking.cancel()
    assert t.turns[0].observation_cut_tokens > 100_000
    assert max(gaps) < sum(gaps) / 2, "rendering them is nearly all of the time"


async def test_groups_are_read_from_their_source_as_slots_become_free(hermes):
    taken, ahead = 0, []

    def source():
        nonlocal taken
        for group in groups_of(200, 4):
            taken += len(group)
            yield group

    def progress(_):
        ahead.append(taken - len(ahead))

    groups, table = await Rollout(make_runner(Desk, ["x"], hermes), RolloutLimits(concurrency=8)).run(
        source(), progress
    )
    assert (len(groups), table.attempts) == (200, 800)
    assert max(ahead) <= 8 + 8 + 4, "those that run, as many that wait, a group more"
