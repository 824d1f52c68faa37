"""The window's laws, on random schedules: the bound on staleness, each slot once, nothing starved, never stuck."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paces import paces

from agentrl.errors import ConfigError, InvariantError
from agentrl.schedule.window import Pace, WindowedFifo


def drive(fifo: WindowedFifo, random: random.Random, rollouts: int, *, restarts: bool = False) -> list[tuple[int, int]]:
    """Finish slots in random order, and train whenever possible; returns (slot, staleness) as they were taken."""
    taken, training = [], False
    while fifo.rollouts < rollouts or training:
        while fifo.may_admit and random.random() < 0.9:
            fifo.admit()
        flying = [s for s in fifo.waiting if not fifo.is_finished(s)]
        choices = [f for f, possible in (("finish", flying), ("train", training or fifo.ready)) if possible]
        if not choices:
            assert fifo.may_admit, f"stuck: {fifo}"
            continue
        if random.choice(choices) == "finish":
            slot = random.choice(flying)
            if restarts and random.random() < 0.3:
                fifo.restart(slot)
            else:
                fifo.finish(slot)
        elif not training:
            taken += fifo.take()
            training = True
        else:
            if fifo.publish_due and not (fifo.pace.whole_rollouts and flying):
                fifo.publish()
            elif fifo.publish_due:
                fifo.finish(flying[0])
                continue
            training = False
    return taken


@given(paces(), st.randoms(use_true_random=False), st.booleans())
def test_every_slot_is_taken_once_within_the_bound_and_nothing_gets_stuck(pace, random, restarts):
    fifo = WindowedFifo(pace, total=8 * pace.batch)
    taken = drive(fifo, random, rollouts=8, restarts=restarts)
    assert sorted(slot for slot, _ in taken) == list(range(8 * pace.batch))
    assert max(staleness for _, staleness in taken) <= pace.max_staleness
    for place, (slot, _) in enumerate(taken):
        waited_for = [s for s, _ in taken[place + 1 :] if s < slot]
        assert not waited_for or slot < min(waited_for) + pace.window, "trained on outside the window"


@given(paces(), st.randoms(use_true_random=False))
def test_a_restored_window_continues_as_the_one_that_was_saved(pace, random):
    fifo = WindowedFifo(pace, total=6 * pace.batch)
    before = drive(fifo, random, rollouts=3)
    state = fifo.state_dict()
    restored = WindowedFifo(pace, total=6 * pace.batch, state=state)
    assert restored.state_dict() == state
    after = drive(restored, random, rollouts=6)
    assert sorted(slot for slot, _ in before + after) == list(range(6 * pace.batch))


def test_the_bound_is_reached_so_it_is_not_larger_than_necessary():
    pace = Pace(batch=2, buffer=4, window=3)
    worst = max(
        staleness
        for seed in range(300)
        for _, staleness in drive(WindowedFifo(pace, total=16), random.Random(seed), rollouts=8)
    )
    assert worst == pace.max_staleness == 2


@pytest.mark.parametrize(
    ("sizes", "staleness", "lag"),
    [
        ({"buffer": 4}, 0, 0),  # synchronous
        ({"buffer": 8}, 1, 1),
        ({"buffer": 12, "window": 1}, 2, 2),
        ({"buffer": 8, "window": 2}, 2, 2),  # S + ⌈(W - 1) / P⌉
        ({"buffer": 8, "window": 5}, 2, 2),
        ({"buffer": 8, "window": 6}, 3, 3),
        ({"buffer": 12, "interval": 2}, 2, 1),  # in versions: divided by the interval
    ],
)
def test_the_bound_in_rollouts_and_in_versions(sizes, staleness, lag):
    pace = Pace(batch=4, **sizes)
    assert (pace.max_staleness, pace.max_version_lag) == (staleness, lag)


def test_staleness_counts_from_the_start_of_the_slot_with_its_time_in_queues():
    fifo = WindowedFifo(Pace(batch=1, buffer=2, window=2), total=4)
    assert [fifo.admit(), fifo.admit()] == [0, 1]
    fifo.finish(1)
    assert fifo.take() == [(1, 0)]
    fifo.publish()
    fifo.finish(0)
    assert fifo.take() == [(0, 1)]  # it started with the weights before the first rollout


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"buffer": 3}, "can never fill"),
        ({"buffer": 4, "interval": 2}, "at least 8"),
        ({"buffer": 4, "window": 5}, "larger than the buffer"),
        ({"buffer": 4, "window": 0}, "at least 1"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Pace(batch=4, **sizes)


def test_a_slot_cannot_finish_twice_or_before_it_starts():
    fifo = WindowedFifo(Pace(batch=1, buffer=1), total=1)
    with pytest.raises(InvariantError, match="not in flight"):
        fifo.finish(0)
    fifo.admit()
    fifo.finish(0)
    with pytest.raises(InvariantError, match="not in flight"):
        fifo.finish(0)
    with pytest.raises(InvariantError, match="may not start"):
        fifo.admit()
    fifo.take()
    with pytest.raises(InvariantError, match="not ready"):
        fifo.take()
