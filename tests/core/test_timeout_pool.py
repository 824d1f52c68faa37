"""User code under a time limit may block, hang, raise, suppress its cancellation or call sys.exit; the event loop continues."""

import asyncio
import sys
import threading
import time
from concurrent.futures import CancelledError as FuturesCancelledError
from functools import partial

import pytest
from doubles import until

from agentrl.core import timeout_pool as pool_module
from agentrl.core.timeout_pool import DeadlineError, PoolExhaustedError, TimeoutPool, is_async
from agentrl.errors import InfraError

SOON_S = 10.0
"""far more than anything here takes when it works"""


@pytest.fixture
def pool():
    made = TimeoutPool("test", threads=4, max_abandoned=3)
    yield made
    made.close()


class Gate:
    """A sync function that hangs until it is opened."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, value=None):
        self.entered.release()
        assert self.open.wait(30)
        return value


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()


async def test_sync_and_async_calls(pool):
    async def add(a, b=1):
        await asyncio.sleep(0)
        return a + b

    assert await pool.call(lambda a, b=1: a + b, 2, b=3) == 5
    assert await pool.call(add, 2, b=3) == 5
    assert await pool.call(lambda: add(2)) == 3  # a sync function that returns a coroutine
    assert await pool.call(threading.current_thread) is not threading.current_thread()


async def test_a_blocking_call_does_not_block_the_loop(pool, gate):
    blocking = asyncio.create_task(pool.call(gate, "done"))
    await until(lambda: gate.entered.acquire(blocking=False))
    assert not blocking.done()
    gate.open.set()
    assert await blocking == "done"


async def test_calls_wait_for_a_free_thread(pool):
    running, most, lock = 0, 0, threading.Lock()

    def work(i):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return i

    assert await asyncio.gather(*(pool.call(work, i) for i in range(20))) == list(range(20))
    assert 2 <= most <= 4


async def test_a_hanging_call_does_not_delay_a_concurrent_one(pool, gate):
    await pool.call(int)  # one idle thread; two calls at once must not both wait for it
    for _ in range(2):
        hanging = asyncio.create_task(pool.call(gate))
        assert await asyncio.wait_for(pool.call(lambda: "done"), SOON_S) == "done"
        assert not hanging.done()
    gate.open.set()


async def test_time_starts_when_the_call_does(gate):
    pool = TimeoutPool("test", threads=1)
    first = asyncio.create_task(pool.call(gate, timeout_s=SOON_S))
    await asyncio.to_thread(gate.entered.acquire)
    second = asyncio.create_task(pool.call(lambda: "done", timeout_s=1.0))
    await asyncio.sleep(1.1)
    gate.open.set()
    assert await first is None
    assert await second == "done"


async def test_an_abandoned_call_frees_its_slot_for_a_waiting_one(gate):
    pool = TimeoutPool("test", threads=1)
    hanging = asyncio.create_task(pool.call(gate, timeout_s=0.1))
    await asyncio.to_thread(gate.entered.acquire)
    waiting = asyncio.create_task(pool.call(lambda: "done"))
    with pytest.raises(DeadlineError):
        await hanging
    assert await asyncio.wait_for(waiting, SOON_S) == "done"
    assert pool.abandoned == 1


@pytest.mark.parametrize("fn", [int, asyncio.sleep])
async def test_a_full_pool_waits_until_a_hanging_call_returns(pool, gate, fn, caplog):
    for _ in range(3):
        with pytest.raises(DeadlineError):
            await pool.call(gate, timeout_s=0.02)
    waiting = [asyncio.create_task(pool.call(fn, 0)) for _ in range(6)]
    await until(lambda: len(pool._waiting) >= 4)
    assert not any(w.done() for w in waiting)
    gate.open.set()
    assert await asyncio.wait_for(asyncio.gather(*waiting), SOON_S) in ([0] * 6, [None] * 6)
    assert [r.message for r in caplog.records] == [
        "test: 3 calls still run past their time limit; further calls wait until one returns, at most 60 s"
    ]
    assert pool._waiting == set()


async def test_a_coroutine_that_hung_and_returns_lets_waiting_calls_continue(monkeypatch):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", 0.01)
    pool, end = TimeoutPool("test", max_abandoned=1), asyncio.Event()

    async def stubborn():
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(DeadlineError):
        await pool.call(stubborn, timeout_s=0.02)
    waiting = asyncio.create_task(pool.call(asyncio.sleep, 0))
    await until(lambda: pool._waiting)
    end.set()
    await asyncio.wait_for(waiting, SOON_S)
    assert pool.abandoned == 0


async def test_a_call_that_is_cancelled_while_the_pool_is_full_waits_no_longer(gate):
    pool = TimeoutPool("test", max_abandoned=1)
    with pytest.raises(DeadlineError):
        await pool.call(gate, timeout_s=0.02)
    waiting = asyncio.create_task(pool.call(int, 0))
    await until(lambda: pool._waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool._waiting == set()


async def test_hanging_calls_are_counted_and_the_pool_refuses_calls_above_the_limit(pool, gate):
    pool.patience_s = 0.05
    for n in range(3):
        with pytest.raises(TimeoutError, match=r"took longer than 0.05 s"):
            await pool.call(gate, timeout_s=0.05)
        assert pool.abandoned == n + 1
    for fn in (int, asyncio.sleep):
        with pytest.raises(PoolExhaustedError, match="3 calls hang") as caught:
            await pool.call(fn, 0)
        assert isinstance(caught.value, InfraError)
    gate.open.set()
    await until(lambda: pool.abandoned == 0)
    assert await pool.call(int, 7) == 7


async def test_threads_do_not_pile_up():
    pool = TimeoutPool("counted", threads=4, max_abandoned=3)

    def threads():
        return sum(t.name == pool.name for t in threading.enumerate())

    for _ in range(2):
        gate = Gate()
        for _ in range(3):
            with pytest.raises(DeadlineError):
                await pool.call(gate, timeout_s=0.02)
        gate.open.set()
        await until(lambda: pool.abandoned == 0)
        await asyncio.gather(*(pool.call(time.sleep, 0.001) for _ in range(50)))
        await until(lambda: threads() <= 4)
    pool.close()
    await until(lambda: threads() == 0)
    assert await pool.call(int, 7) == 7  # closing ends idle threads only


async def test_a_cancelled_call_is_abandoned_and_frees_its_slot(gate):
    pool = TimeoutPool("test", threads=1)
    hanging = asyncio.create_task(pool.call(gate))
    await asyncio.to_thread(gate.entered.acquire)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert pool.abandoned == 1
    assert await asyncio.wait_for(pool.call(int, 7), SOON_S) == 7


async def test_cancelled_while_it_waits_for_a_thread(gate):
    pool = TimeoutPool("test", threads=1)
    hanging = asyncio.create_task(pool.call(gate, "first"))
    await asyncio.to_thread(gate.entered.acquire)
    calls = []
    waiting = asyncio.create_task(pool.call(calls.append, 1))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open.set()
    assert await hanging == "first"
    assert (calls, pool.abandoned) == ([], 0)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("bad"), ValueError),
        (TimeoutError("of its own"), TimeoutError),
        (StopIteration(), RuntimeError),
        (SystemExit(3), RuntimeError),
        (FuturesCancelledError(), FuturesCancelledError),
        (asyncio.CancelledError(), RuntimeError),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_exception_of_user_code_is_raised_only_in_the_caller(pool, kind, raised, seen):
    def sync():
        raise raised

    async def coroutine():
        raise raised

    with pytest.raises(seen) as caught:
        await asyncio.wait_for(pool.call(sync if kind == "sync" else coroutine, timeout_s=SOON_S), 2 * SOON_S)
    assert not isinstance(caught.value, DeadlineError)
    assert pool.abandoned == 0
    assert await pool.call(int, 7) == 7


async def test_sys_exit_is_raised_with_its_status(pool):
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await pool.call(sys.exit, 3)


async def test_an_async_call_that_runs_out_of_time_may_clean_up(pool):
    cleaned = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(DeadlineError):
        await pool.call(slow, timeout_s=0.02)
    assert cleaned == [True]
    task = asyncio.create_task(pool.call(slow))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [True, True]
    assert pool.abandoned == 0


async def test_a_coroutine_that_suppresses_its_cancellation_is_abandoned(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", 0.05)
    over = asyncio.Event()

    async def stubborn():
        while not over.is_set():
            try:
                await asyncio.wait_for(over.wait(), 60)
            except asyncio.CancelledError:
                continue
        raise ValueError("nobody listens any more")

    with pytest.raises(DeadlineError):
        await asyncio.wait_for(pool.call(stubborn, timeout_s=0.02), SOON_S)
    assert pool.abandoned == 1
    over.set()
    await until(lambda: pool.abandoned == 0)


async def test_arguments_may_have_any_name(pool):
    assert await pool.call(dict, fn=1, self=2) == {"fn": 1, "self": 2}


def test_a_call_may_return_after_its_event_loop_was_closed(recwarn):
    gate = Gate()
    pool = TimeoutPool("test")

    async def main():
        with pytest.raises(DeadlineError):
            await pool.call(gate, timeout_s=0.02)

    asyncio.run(main())
    gate.open.set()
    deadline = time.monotonic() + SOON_S
    while pool.abandoned and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pool.abandoned == 0


def test_is_async():
    class Callable:
        async def __call__(self):
            pass

    async def coroutine():
        pass

    assert is_async(coroutine)
    assert is_async(Callable())
    assert is_async(Callable().__call__)
    assert is_async(partial(partial(coroutine)))
    assert is_async(partial(Callable()))
    assert not is_async(print)
    assert not is_async(lambda: coroutine())


class OddError(BaseException):
    """Not an Exception."""


class MuteError(BaseException):
    def __str__(self):
        raise ValueError("mute")


@pytest.mark.parametrize("kind", [OddError, MuteError, GeneratorExit])
async def test_a_base_exception_of_user_code_is_an_ordinary_error(pool, kind):
    def fail():
        raise kind

    async def fail_async():
        raise kind

    for fn in (fail, fail_async) if kind is not GeneratorExit else (fail,):
        with pytest.raises(RuntimeError, match=kind.__name__):
            await pool.call(fn, timeout_s=5)
