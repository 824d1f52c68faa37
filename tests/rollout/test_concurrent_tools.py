"""Several tool calls at the same time: their order, their time limits, and that slow tools delay only their callers."""

import asyncio
import contextlib
import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_calls import SOON_S, call, run, specs

from agentrl.core.timeout_pool import PoolExhaustedError, TimeoutPool
from agentrl.env import Env
from agentrl.errors import ContractError, ToolFailure
from agentrl.rollout.tool_executor import ToolExecutor, to_text
from agentrl.tool import Tool, ToolLimits, spec_of, tool
from agentrl.types import Action, ToolCall


class Ledger(Env):
    """Its tools depend on the order of the calls."""

    def __init__(self):
        self.seen, self.running, self.most = [], 0, 0

    def note(self, n, s):
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(s)
        self.seen.append(n)
        self.running -= 1
        return self.seen[:]

    @tool
    def push(self, n: int, s: float = 0.0) -> list[int]:
        """Push."""
        return self.note(n, s)

    @tool
    async def push_async(self, n: int, s: float = 0.0) -> list[int]:
        """Push."""
        await asyncio.sleep(s)
        return self.note(n, 0)

    @tool(parallel=True)
    def peek(self, n: int, s: float = 0.0) -> list[int]:
        """Peek."""
        return self.note(n, s)


class Counting(Tool):
    """Waits until as many calls run as it is told."""

    limits = ToolLimits(timeout_s=5.0)

    def __init__(self):
        self.running, self.met = 0, asyncio.Event()

    async def call(self, meet: int) -> str:
        """Meet the others."""
        self.running += 1
        if self.running == meet:
            self.met.set()
        try:
            async with asyncio.timeout(0.2):
                await self.met.wait()
        except TimeoutError:
            return "alone"
        return "met"


class TestSeveralCallsInOneTurn:
    @pytest.mark.parametrize("names", [("push",) * 4, ("push_async",) * 4, ("push", "push_async", "peek", "push")])
    async def test_they_run_one_after_the_other_in_the_order_written(self, tool_executor, names):
        env = Ledger()
        tools = {s.name: s for s in env.tool_specs()}
        calls = tuple(ToolCall(name, {"n": i, "s": 0.03 - 0.01 * i}, f"c{i}") for i, name in enumerate(names))
        action = await tool_executor.execute(tools, Action("x", calls))
        assert [json.loads(r.content) for r in action.results] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert env.most == 1

    async def test_a_failed_call_does_not_stop_those_after_it(self, tool_executor):
        env = Ledger()
        tools = {s.name: s for s in env.tool_specs()}
        calls = (call("push", n="x"), call("none"), call("push", n=1))
        action = await tool_executor.execute(tools, Action("x", calls))
        assert [r.is_error for r in action.results] == [True, True, False]
        assert env.seen == [1]

    @pytest.mark.parametrize(("parallel", "text"), [(True, "met"), (False, "alone")])
    async def test_a_tool_declares_that_its_calls_may_run_at_the_same_time(self, tool_executor, parallel, text):
        class Meeting(Counting):
            pass

        Meeting.parallel = parallel
        spec = spec_of(Meeting())
        assert spec.limits == ToolLimits(timeout_s=5.0, parallel=parallel)
        action = await tool_executor.execute({spec.name: spec}, Action("x", (call(spec.name, meet=2),) * 2))
        assert action.results[0].content == text

    async def test_a_call_that_is_not_parallel_waits_for_those_before_it_and_those_after_wait_for_it(
        self, tool_executor
    ):
        env = Ledger()
        tools = {s.name: s for s in env.tool_specs()}
        names = ["peek", "peek", "push", "peek", "peek"]
        calls = tuple(
            ToolCall(name, {"n": i, "s": 0.05 if i % 3 == 0 else 0.0}, f"c{i}") for i, name in enumerate(names)
        )
        action = await tool_executor.execute(tools, Action("x", calls))
        assert env.seen == [1, 0, 2, 4, 3]
        assert [r.call_id for r in action.results] == [f"c{i}" for i in range(5)]


class TestTime:
    async def test_a_sync_tool_that_hangs(self, tool_executor):
        gate = threading.Event()

        @tool(timeout_s=0.1, retries=3)
        def hang():
            gate.wait(30)

        result = await run(tool_executor, hang)
        assert (result.content, result.is_error) == ("error: hang did not answer within 0.1 s", True)
        assert tool_executor.counts["hang"] == {"calls": 1, "timeouts": 1, "hung": 1}
        gate.set()

    async def test_an_async_tool_that_hangs(self, tool_executor):
        @tool(timeout_s=0.1)
        async def hang():
            await asyncio.sleep(30)

        assert (await run(tool_executor, hang)).content == "error: hang did not answer within 0.1 s"
        assert tool_executor.counts["hang"]["hung"] == 0

    async def test_a_tool_whose_max_hung_calls_never_return_fails_after_its_patience(self, tool_executor, monkeypatch):
        monkeypatch.setattr(TimeoutPool.__init__, "__defaults__", (8, 8, 0.05))
        gate = threading.Event()

        @tool(timeout_s=0.05, max_hung=2)
        def hang():
            gate.wait(30)

        for _ in range(2):
            assert (await run(tool_executor, hang)).is_error
        with pytest.raises(ToolFailure, match="2 calls hang") as caught:
            await run(tool_executor, hang)
        assert caught.value.cause == f"tool hang: {PoolExhaustedError.__name__}"
        gate.set()

    async def test_a_slow_tool_delays_neither_the_loop_nor_other_tools(self, tool_executor):
        gate = threading.Event()

        @tool(max_concurrency=2)
        def slow():
            gate.wait(30)
            return "slow"

        @tool
        def quick():
            return "quick"

        tools = specs(slow, quick)
        waiting = [asyncio.create_task(tool_executor.execute(tools, Action("x", (call("slow"),)))) for _ in range(50)]
        for _ in range(20):
            action = await asyncio.wait_for(tool_executor.execute(tools, Action("x", (call("quick"),))), SOON_S)
            assert action.results[0].content == "quick"
        assert not any(w.done() for w in waiting)
        gate.set()
        assert {(await w).results[0].content for w in waiting} == {"slow"}

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_max_concurrency_counts_over_all_episodes(self, tool_executor, kind):
        running, most = 0, 0
        lock = threading.Lock()

        @contextlib.contextmanager
        def counted():
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            yield
            with lock:
                running -= 1

        def sync():
            with counted():
                time.sleep(0.01)

        async def coroutine():
            with counted():
                await asyncio.sleep(0.01)

        tools = specs(tool(name="limited", max_concurrency=3)(sync if kind == "sync" else coroutine))
        await asyncio.gather(
            *(tool_executor.execute(tools, Action("x", (call("limited"), call("limited")))) for _ in range(10))
        )
        assert most == 3
        assert tool_executor.counts["limited"]["calls"] == 20

    async def test_waiting_for_a_place_is_not_a_timeout(self, tool_executor):
        @tool(max_concurrency=1, timeout_s=1.0)
        def work():
            time.sleep(0.1)
            return "done"

        tools = specs(work)
        actions = await asyncio.gather(*(tool_executor.execute(tools, Action("x", (call("work"),))) for _ in range(15)))
        assert [a.results[0].content for a in actions] == ["done"] * 15

    async def test_a_cancelled_episode_frees_its_slots(self, tool_executor):
        @tool(max_concurrency=1)
        async def work(s: float):
            await asyncio.sleep(s)
            return "done"

        tools = specs(work)
        episode = asyncio.create_task(
            tool_executor.execute(tools, Action("x", (call("work", s=30.0), call("work", s=30.0))))
        )
        await asyncio.sleep(0.02)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        action = await asyncio.wait_for(tool_executor.execute(tools, Action("x", (call("work", s=0.0),))), SOON_S)
        assert action.results[0].content == "done"


class TestSharing:
    async def test_one_of_several_processes_has_its_part_of_the_calls(self):
        running = most = 0

        @tool(max_concurrency=5)
        async def work():
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1

        part = ToolExecutor(processes=2)
        await asyncio.gather(*(part.execute(specs(work), Action("x", (call("work"),))) for _ in range(8)))
        assert most == 2
        with pytest.raises(ContractError, match="at most --runner-processes 5"):
            await ToolExecutor(processes=6).execute(specs(work), Action("x", (call("work"),)))

    async def test_tools_of_the_same_name_in_two_environments_keep_their_limits(self, tool_executor):
        gate = threading.Event()

        class Slow(Tool):
            name = "search"

            def call(self) -> str:
                gate.wait(30)
                return "slow"

        class Quick(Tool):
            name = "search"

            def call(self) -> str:
                return "quick"

        Slow.limits = Quick.limits = spec_of(tool(name="x", max_concurrency=1)(lambda: None)).limits
        waiting = asyncio.create_task(run(tool_executor, Slow()))
        await asyncio.sleep(0.02)
        assert (await asyncio.wait_for(run(tool_executor, Quick()), SOON_S)).content == "quick"
        gate.set()
        assert (await waiting).content == "slow"
        assert tool_executor.counts["search"] == {"calls": 2, "cut": 0, "hung": 0}

    async def test_instances_of_one_tool_share_its_limits(self, tool_executor):
        running = []

        class Counter(Tool):
            async def call(self) -> int:
                running.append(1)
                most = len(running)
                await asyncio.sleep(0.01)
                running.pop()
                return most

        Counter.limits = spec_of(tool(name="x", max_concurrency=2)(lambda: None)).limits
        results = await asyncio.gather(*(run(tool_executor, Counter()) for _ in range(8)))
        assert max(int(r.content) for r in results) == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda v: st.lists(v) | st.dictionaries(st.text(max_size=3), v),
    )
)
def test_json_values_read_back_as_they_were(value):
    text = to_text([value])
    assert json.loads(text) == [value]
