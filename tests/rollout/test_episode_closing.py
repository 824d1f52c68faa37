"""One episode: rewards, and what is closed after any outcome."""

import asyncio
import threading
import time

import pytest
from doubles import PARIS, FakeGenerator, call, make_runner, play, until
from echo import Echo, Slow

from agentrl import Env, StepResult, Tool, ToolEnv, tool
from agentrl.errors import EngineFailure
from agentrl.reward import Reward
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Status, StopReason


@pytest.fixture(autouse=True)
def _fresh():
    Echo.made = []


SOON_S = 10


# -- rewards ---------------------------------------------------------------------------------------------------------

HANG = threading.Event()


async def _forever(trajectory):
    await asyncio.sleep(60)


REWARDS = {
    "raises": (lambda t: 1 / 0, "ZeroDivisionError"),
    "NaN": (lambda t: float("nan"), "not a number"),
    "infinite": (lambda t: float("inf"), "not a number"),
    "a string": (lambda t: "1.0", "not a number"),
    "a string in a dict": (lambda t: {"a": 1.0, "b": "x"}, "not a number"),
    "beyond a float": (lambda t: 10**400, "not a number"),
    "a list": (lambda t: [1.0], "not a number"),
    "never returns": (lambda t: HANG.wait(30), "timeout"),
    "never returns, async": (_forever, "timeout"),
}


@pytest.mark.parametrize("kind", REWARDS)
async def test_case_22_a_bad_reward_fails_the_episode_and_is_not_zero(hermes, kind):
    fn, cause = REWARDS[kind]
    t = await play(Echo, ["x"], hermes, env_args={"ends": 1}, rewards=[Reward(fn, "bad", timeout_s=0.1)])
    HANG.set()
    HANG.clear()
    assert (t.stop_reason, t.status, t.rewards) == (StopReason.REWARD_FAILURE, Status.FAILED, {})
    assert t.cause.startswith("reward bad")
    assert cause in t.cause
    assert to_samples(t) == []


async def test_case_22_a_reward_of_none_abstains(hermes):
    t = await play(
        Echo,
        ["x"],
        hermes,
        env_args={"ends": 1},
        rewards=[Reward(lambda t: None, "quiet"), Reward(lambda t: 2, "two", 0.5)],
    )
    assert (t.rewards, t.stop_reason) == ({"quiet": None, "two": 2.0}, StopReason.TERMINATED)
    assert t.score == 0.25 + 1.0


async def test_case_22_a_blocking_reward_does_not_block_the_event_loop(hermes):
    entered, goes_on = threading.Event(), threading.Event()

    def blocks(trajectory):
        entered.set()
        return float(goes_on.wait(SOON_S))

    playing = asyncio.create_task(play(Echo, ["x"], hermes, env_args={"ends": 1}, rewards=[Reward(blocks, "slow")]))
    await until(entered.is_set)
    goes_on.set()
    t = await playing
    assert t.rewards == {"slow": 1.0}


async def test_a_truncated_episode_is_scored_too(hermes):
    t = await play(Echo, ["x"], hermes, max_turns=2, rewards=[Reward(lambda t: 1.0, "one", 3.0)])
    assert t.score == 2 * 0.25 + 3.0


# -- closing ---------------------------------------------------------------------------------------------------------


class SyncEcho(Env):
    """As Echo, with sync methods; may sleep in reset, and raise anywhere."""

    made = []
    timeout_s = 5.0

    def __init__(self, ends=None, fails="", slow=0.0):
        self.ends, self.fails, self.slow = ends, fails, slow
        self.steps = self.closed = 0
        Echo.made.append(self)

    def reset(self, task, *, seed):
        time.sleep(self.slow)
        self._maybe("reset")
        return task.messages

    def step(self, action):
        self.steps += 1
        self._maybe("step")
        return StepResult("go on", terminated=self.steps == self.ends)

    def state(self):
        self._maybe("state")
        return {"steps": self.steps}

    def close(self):
        self.closed += 1
        self._maybe("close")

    def _maybe(self, where):
        if where == self.fails:
            raise RuntimeError(where)


class AsyncEcho(SyncEcho):
    async def reset(self, task, *, seed):
        await asyncio.sleep(self.slow)
        self._maybe("reset")
        return task.messages

    async def step(self, action):
        return SyncEcho.step(self, action)

    async def state(self):
        return SyncEcho.state(self)

    async def close(self):
        await asyncio.sleep(0)
        SyncEcho.close(self)


@pytest.mark.parametrize("env", [SyncEcho, AsyncEcho])
@pytest.mark.parametrize(
    ("args", "more", "reason"),
    [
        ({"ends": 1}, {}, StopReason.TERMINATED),
        ({}, {"max_turns": 2}, StopReason.MAX_TURNS),
        ({"fails": "reset"}, {}, StopReason.ENV_FAILURE),
        ({"fails": "step"}, {}, StopReason.ENV_FAILURE),
        ({"fails": "state", "ends": 1}, {}, StopReason.ENV_FAILURE),
        ({"fails": "close", "ends": 1}, {}, StopReason.TERMINATED),
        ({"slow": 0.4}, {"episode_timeout_s": 0.1}, StopReason.EPISODE_TIMEOUT),
    ],
    ids=["end", "max turns", "reset raises", "step raises", "state raises", "close raises", "timeout in reset"],
)
async def test_case_27_close_is_called_exactly_once(hermes, env, args, more, reason):
    engine = FakeGenerator(hermes, ["x"])
    t = await play(env, engine, hermes, env_args=args, **more)
    assert t.stop_reason is reason
    assert [e.closed for e in Echo.made] == [1]
    assert engine.released == ["0-0"]
    if args.get("fails") == "close":
        assert t.cause == "while closing: env close: RuntimeError"
    if args.get("fails") == "state":  # rewards would have nothing to go by
        assert (t.cause, t.rewards) == ("env state: RuntimeError", {})


@pytest.mark.parametrize("env", [SyncEcho, AsyncEcho])
@pytest.mark.parametrize("when", ["reset", "generate"])
async def test_case_27_close_after_a_cancel(hermes, env, when):
    reached = asyncio.Event()

    async def script(request):
        reached.set()
        await asyncio.sleep(30)

    runner = make_runner(env, script, hermes, env_args={"slow": 0.3 if when == "reset" else 0.0})
    task = asyncio.create_task(runner.run(EpisodeSpec(PARIS, 0, 0)))
    if when == "reset":
        await until(lambda: Echo.made)
        await asyncio.sleep(0.05)
    else:
        await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [e.closed for e in Echo.made] == [1]


async def test_case_27_closing_continues_when_it_is_cancelled(hermes):
    closing, go_on = asyncio.Event(), asyncio.Event()

    class SlowState(AsyncEcho):
        async def state(self):
            closing.set()
            await go_on.wait()
            return {}

    engine = FakeGenerator(hermes, ["x"])
    task = asyncio.create_task(
        make_runner(SlowState, engine, hermes, env_args={"ends": 1}).run(EpisodeSpec(PARIS, 0, 0))
    )
    await closing.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ([e.closed for e in Echo.made], engine.released) == ([1], ["0-0"])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_case_27_close_when_every_other_call_of_the_environment_hangs(hermes):
    gate = threading.Event()

    class Hangs(SyncEcho):
        threads = 2
        timeout_s = 0.05

        def reset(self, task, *, seed):
            gate.wait(1)

    runner = make_runner(Hangs, ["x"], hermes)
    found = [await runner.run(EpisodeSpec(PARIS, 0, i)) for i in range(4)]
    assert {t.stop_reason for t in found} == {StopReason.ENV_FAILURE}
    assert [e.closed for e in Echo.made] == [1] * len(Echo.made)
    assert len(Echo.made) >= 2
    gate.set()
    runner.close()


async def test_an_engine_that_fails_on_release_does_not_end_the_run(hermes):
    engine = FakeGenerator(hermes, ["x"])

    async def release(session):
        raise EngineFailure("gone")

    engine.release = release
    t = await play(Echo, engine, hermes, env_args={"ends": 1})
    assert (t.stop_reason, t.cause) == (StopReason.TERMINATED, "while closing: gone")
    assert Echo.made[0].closed == 1
    t = await play(SyncEcho, engine, hermes, env_args={"ends": 1, "fails": "close"})
    assert t.cause == "while closing: env close: RuntimeError", "the first failure is the one that is told"


async def test_the_final_state_is_recorded(hermes):
    t = await play(SyncEcho, ["x"], hermes, env_args={"ends": 2})
    assert t.state == {"steps": 2}


async def test_an_environment_that_blocks_does_not_block_the_event_loop(hermes):
    together = threading.Barrier(8)

    class Waits(SyncEcho):
        def reset(self, task, *, seed):
            together.wait(SOON_S)
            return super().reset(task, seed=seed)

    runner = make_runner(Waits, ["x"], hermes, env_args={"ends": 1})
    done = await asyncio.gather(*(runner.run(EpisodeSpec(PARIS, 0, i)) for i in range(8)))
    assert {t.stop_reason for t in done} == {StopReason.TERMINATED}


@pytest.mark.parametrize("how", ["cancel", "episode timeout"])
async def test_case_27_close_after_a_cut_in_the_constructor(hermes, how):
    begun = threading.Event()

    class SlowToMake(AsyncEcho):
        def __init__(self):
            begun.set()
            time.sleep(0.2)
            super().__init__()

    runner = make_runner(SlowToMake, ["x"], hermes, episode_timeout_s=0.1)
    task = asyncio.create_task(runner.run(EpisodeSpec(PARIS, 0, 0)))
    if how == "cancel":
        await until(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert (await task).stop_reason is StopReason.EPISODE_TIMEOUT
    assert [e.closed for e in Echo.made] == [1]


async def test_a_constructor_that_raises_is_the_environments_failure(hermes):
    class Broken(Echo):
        def __init__(self):
            raise KeyError("x")

    t = await play(Broken, ["x"], hermes)
    assert (t.stop_reason, t.cause) == (StopReason.ENV_FAILURE, "env constructor: KeyError")


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError])
async def test_a_tools_constructor_that_raises_is_the_environments_failure(hermes, error):
    class Broken(Tool):
        def __init__(self):
            raise error("no")

        def call(self) -> str:
            return ""

    class Uses(Echo):
        tools = (Broken,)

    t = await play(Uses, ["x"], hermes)
    assert t.stop_reason is StopReason.ENV_FAILURE
    assert t.cause.startswith("tool constructor: ")
    assert [e.closed for e in Echo.made] == [1]


class StuckTool(Echo, ToolEnv):
    step = ToolEnv.step

    @tool
    async def stuck(self) -> str:
        """Never answer."""
        await asyncio.sleep(60)
        return ""


async def _never(request):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("env", "args", "script", "during"),
    [
        (AsyncEcho, {"slow": 60.0}, ["x"], "reset"),
        (Echo, {}, _never, "generation"),
        (Slow, {}, ["x"], "step"),
        (StuckTool, {}, [call("stuck")], "tool calls"),
    ],
    ids=["reset", "generate", "step", "tool"],
)
async def test_order_the_time_limit_ends_the_episode_at_any_moment(hermes, env, args, script, during):
    engine = FakeGenerator(hermes, script)
    t = await play(env, engine, hermes, env_args=args, episode_timeout_s=0.1)
    assert (t.stop_reason, t.status, t.cause) == (StopReason.EPISODE_TIMEOUT, Status.TRUNCATED, f"during {during}")
    assert t.detail.startswith(f"not finished after 0.1 s (--episode-timeout-s), during {during}, with ")
    assert "s in generations, " in t.detail
    assert [e.closed for e in Echo.made] == [1]
    assert engine.released == ["0-0"]
    assert engine.running == 0
