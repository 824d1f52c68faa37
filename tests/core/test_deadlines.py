"""Deadlines: one timer for many waits; each expires in its time and no other does."""

import asyncio
import random

import pytest

from agentrl.core.deadlines import Deadlines
from agentrl.schedule.virtual_clock import run_virtual


def test_each_wait_expires_at_its_time_unless_it_was_removed():
    rng = random.Random(0)
    waits = {key: (rng.uniform(0, 50), rng.uniform(0.5, 100), rng.random() < 0.5) for key in range(300)}
    expired: dict[int, float] = {}

    async def play():
        loop = asyncio.get_running_loop()
        deadlines = Deadlines[int](lambda key: expired.update({key: loop.time()}))
        for key, (begin, limit, removed) in waits.items():
            loop.call_at(begin, deadlines.add, key, limit)
            if removed:
                loop.call_at(begin + limit * rng.uniform(0.1, 0.9), deadlines.remove, key)
        await asyncio.sleep(200)

    run_virtual(play())
    assert expired == {k: pytest.approx(begin + limit) for k, (begin, limit, removed) in waits.items() if not removed}


async def test_many_waits_that_end_in_time_make_one_timer(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda when, *args, **kw: timers.append(when) or call_at(when, *args, **kw))
    deadlines = Deadlines[int](lambda key: pytest.fail(f"{key} expired"))
    for key in range(1000):
        deadlines.add(key, 60.0)
        deadlines.remove(key)
    assert len(timers) == 1


async def test_a_shorter_wait_is_not_late_because_a_longer_one_began_before():
    expired = asyncio.get_running_loop().create_future()
    deadlines = Deadlines[str](expired.set_result)
    deadlines.add("long", 60.0)
    deadlines.add("short", 0.01)
    assert await asyncio.wait_for(expired, 5.0) == "short"


def test_waits_of_a_loop_that_was_closed_do_not_keep_a_later_loop_from_expiring():
    expired = []
    deadlines = Deadlines[str](expired.append)

    async def play(key, limit_s):
        deadlines.add(key, limit_s)
        await asyncio.sleep(0.05)

    asyncio.run(play("never", 60.0))
    asyncio.run(play("soon", 0.01))
    assert expired == ["soon"]


def test_waits_of_two_open_loops_are_refused():
    deadlines = Deadlines[str](lambda key: None)
    loop = asyncio.new_event_loop()
    try:
        loop.call_soon(deadlines.add, "first", 60.0)
        loop.call_soon(loop.stop)
        loop.run_forever()

        async def second():
            deadlines.add("second", 60.0)

        with pytest.raises(RuntimeError, match="two event loops"):
            asyncio.run(second())
    finally:
        loop.close()
