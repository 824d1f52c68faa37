"""The pipeline on a virtual clock: it follows the window, waits for nothing else, and passes failures on."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paces import paces

from agentrl.schedule.pipeline import Pipeline
from agentrl.schedule.virtual_clock import Deadlock, run_virtual, spend
from agentrl.schedule.window import Pace, WindowedFifo

TRAIN_S = 1.0


async def train(pipeline: Pipeline, rollouts: int) -> list:
    """A training loop with a trainer that takes a second."""
    taken = []
    async with pipeline:
        while pipeline.fifo.rollouts < rollouts:
            taken += await pipeline.take()
            await asyncio.sleep(TRAIN_S)
            if pipeline.fifo.publish_due:
                async with pipeline.publishing():
                    await asyncio.sleep(0.1)
    return taken


def player(seed: int, *, fails: float = 0.0):
    """Plays a slot in a random time; some have no outcome, as when every tool or every engine fails."""

    async def play(slot: int) -> int | None:
        chance = random.Random(f"{seed} {slot}")
        await asyncio.sleep(chance.lognormvariate(0.0, 1.5))
        return None if chance.random() < fails else slot

    return play


@given(paces(), st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]))
def test_all_slots_are_trained_on_once_within_the_bound_however_many_fail(pace, seed, fails):
    taken = run_virtual(train(Pipeline(WindowedFifo(pace, 6 * pace.batch), player(seed, fails=fails)), 6))
    assert sorted(t.slot for t in taken) == list(range(6 * pace.batch))
    assert all(t.outcome in (None, t.slot) for t in taken)
    assert max(t.staleness for t in taken) <= pace.max_staleness


@given(paces(), st.integers(0, 1000))
def test_a_pipeline_continues_from_a_saved_state_without_losing_a_slot(pace, seed):
    total, played = 8 * pace.batch, []

    async def play(slot: int) -> int:
        played.append(slot)
        return await player(seed)(slot)

    async def interrupted() -> tuple[dict, dict, list]:
        taken = []
        async with Pipeline(WindowedFifo(pace, total), play) as pipeline:
            for _ in range(4):
                taken += await pipeline.take()
                await asyncio.sleep(TRAIN_S)
                if pipeline.fifo.publish_due:
                    async with pipeline.publishing():
                        pass
            return pipeline.fifo.state_dict(), dict(pipeline.outcomes), taken

    state, outcomes, before = run_virtual(interrupted())
    kept = set(outcomes)
    played.clear()
    after = run_virtual(train(Pipeline(WindowedFifo(pace, total, state), play, outcomes), 8))
    assert sorted(t.slot for t in before + after) == list(range(total))
    assert not kept & set(played), "a group that had finished was played again"


def test_a_slow_slot_holds_back_no_more_than_the_window():
    async def play(slot: int) -> int:
        await asyncio.sleep(100.0 if slot == 0 else 1.0)
        return slot

    async def second_rollout(window: int) -> float:
        pace = Pace(batch=2, buffer=6, window=window)
        async with Pipeline(WindowedFifo(pace, 8), play) as pipeline:
            await pipeline.take()
            return asyncio.get_running_loop().time()

    assert run_virtual(second_rollout(window=1)) == 100.0
    assert run_virtual(second_rollout(window=3)) == 1.0


def test_whole_rollouts_update_weights_while_nothing_is_in_flight():
    pace = Pace(batch=3, buffer=6, whole_rollouts=True)

    async def check() -> None:
        async with Pipeline(WindowedFifo(pace, 12), player(3)) as pipeline:
            for _ in range(4):
                await pipeline.take()
                async with pipeline.publishing():
                    assert not pipeline.fifo.in_flight

    run_virtual(check())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_a_rollout_that_stops_the_rest_takes_the_first_to_finish_of_those_that_started_with_its_weights(
    batch, more, seed
):
    pace = Pace(batch=batch, buffer=batch + more, window=batch + more, stops_rest=True)
    chance, started, stopped = random.Random(seed), [], []
    longest = 100.0

    async def play(slot: int) -> float:
        seconds = longest if slot == 0 else chance.uniform(0.0, 10.0)
        started.append(seconds)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            stopped.append(slot)
            raise
        return seconds

    async def check() -> None:
        slots = []
        async with Pipeline(WindowedFifo(pace, 5 * batch + more), play) as pipeline:
            for _ in range(5):
                taken = await pipeline.take()
                assert sorted(t.outcome for t in taken) == sorted(started)[:batch]
                assert {t.staleness for t in taken} == {0}
                slots += [t.slot for t in taken]
                rest = await pipeline.stop_rest()
                assert sorted(rest) == sorted(stopped)
                assert len(rest) == more
                await asyncio.sleep(TRAIN_S)
                started.clear()
                stopped.clear()
                async with pipeline.publishing():
                    assert not started, "nothing runs during training"
                await asyncio.sleep(0)
        assert len(set(slots)) == 5 * batch
        assert 0 not in slots

    run_virtual(check())
    assert pace.max_staleness == 0


def test_a_failure_of_a_slot_is_raised_and_the_others_are_cancelled():
    cancelled = []

    async def play(slot: int) -> int:
        try:
            await asyncio.sleep(1.0 + slot)
        except asyncio.CancelledError:
            cancelled.append(slot)
            raise
        raise ValueError("a bug")

    async def check() -> None:
        async with Pipeline(WindowedFifo(Pace(batch=2, buffer=3), 4), play) as pipeline:
            await pipeline.take()

    with pytest.raises(ValueError, match="a bug"):
        run_virtual(check())
    assert cancelled == [1, 2]


def test_what_an_executor_runs_takes_the_virtual_time_that_it_spends():
    def work(seconds: float) -> float:
        spend(seconds)
        if seconds > 5:
            raise ValueError("too long")
        return seconds

    async def check() -> None:
        clock = asyncio.get_running_loop().time
        assert await asyncio.gather(*(asyncio.to_thread(work, s) for s in (2.0, 5.0))) == [2.0, 5.0]
        assert clock() == 5.0
        with pytest.raises(ValueError, match="too long"):
            await asyncio.to_thread(work, 6.0)
        assert clock() == 11.0

    run_virtual(check())
    spend(1.0)  # outside a virtual loop it does nothing


def test_a_virtual_loop_takes_no_time_and_finds_deadlocks():
    async def wait() -> float:
        await asyncio.gather(*(asyncio.sleep(s) for s in (3600, 7200)))
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == 7200.0
    with pytest.raises(Deadlock):
        run_virtual(asyncio.Event().wait())
