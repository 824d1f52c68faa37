"""From scores to advantages: by group, by the treatment of truncated episodes; equal rewards have advantage 0."""

import itertools
import math

import pytest
from doubles import PROMPT, SAMPLED, group_of, span, trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError, UnknownNameError
from agentrl.train.advantage import group_advantages
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.types import Group, StopReason, Task

GROUP = ("dr_grpo", "grpo", "rloo")
"""estimators whose advantages of a group add up to 0"""
SCORES = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


def values(group, estimator="grpo", truncated="train"):
    found = group_advantages([group], estimator, truncated)
    return [found.get(t.episode_id) for t in group.trajectories]


def test_grpo_is_the_score_in_standard_deviations():
    mean, std = 0.5, math.sqrt(4 * 0.25 / 3)
    assert values(group_of(1, 1, 0, 0)) == pytest.approx([(s - mean) / (std + 1e-6) for s in (1, 1, 0, 0)])


def test_dr_grpo_is_the_score_less_the_mean():
    assert values(group_of(1, 0, 0, 0), "dr_grpo") == [0.75, -0.25, -0.25, -0.25]


def test_rloo_is_the_score_less_the_mean_of_the_others():
    assert values(group_of(1, 0, 0), "rloo") == [1.0, -0.5, -0.5]


@given(SCORES, st.sampled_from(GROUP))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(scores, estimator):
    found = values(group_of(*scores), estimator)
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    ranked = sorted(zip(scores, found, strict=True))
    assert all(a[1] <= b[1] + 1e-9 for a, b in itertools.pairwise(ranked))


@given(SCORES, SCORES)
def test_groups_do_not_touch_each_other(a, b):
    first, second = group_of(*a, index=0), group_of(*b, index=1)
    together = group_advantages([first, second])
    assert together == {**group_advantages([first]), **group_advantages([second])}
    assert together == group_advantages([second, first])


@pytest.mark.parametrize("estimator", GROUP)
@pytest.mark.parametrize("scores", [(1.0,), (0.5, 0.5, 0.5), (0.0, 0.0), (1.0, 1.0 + 1e-9, 1.0 - 1e-9)], ids=str)
def test_case_23_a_group_of_one_or_of_equal_rewards_has_no_advantage(estimator, scores):
    assert values(group_of(*scores), estimator) == [0.0] * len(scores)


def test_case_23_a_group_that_lost_members_uses_those_it_has():
    assert values(group_of(1, 0), "dr_grpo") == [0.5, -0.5]


def test_case_24_no_advantage_on_a_token_that_is_masked():
    from agentrl.types import Provenance

    spans = [
        span(PROMPT, (1, 2), -1),
        span(SAMPLED, (3, 4)),
        span(Provenance.OBSERVATION, (5, 6, 7)),
        span(SAMPLED, (8,), 1),
    ]
    winner, loser = trajectory([spans], index=0, score=1.0), trajectory([spans], index=1, score=0.0)
    samples = [s for t in (winner, loser) for s in to_samples(t)]
    for row in make_rows(samples, group_advantages([Group(0, Task("x", "x"), (winner, loser))])):
        assert (row.advantages != 0).tolist() == [False, False, True, True, False, False, False, True]
        assert (row.weights != 0).tolist() == (row.advantages != 0).tolist()


def test_case_25_segments_of_one_episode_count_once_in_the_baseline():
    def segment(first):
        return [span(PROMPT, (first,), -1), span(SAMPLED, (first, first))]

    fan_out = trajectory([segment(1), segment(2), segment(3)], index=0, score=1.0)
    other = trajectory([segment(4)], index=1, score=0.0)
    found = group_advantages([Group(0, Task("x", "x"), (fan_out, other))], "dr_grpo")
    assert found == {"0-0": 0.5, "1-0": -0.5}  # the baseline is 0.5, not 0.75
    rows = make_rows(to_samples(fan_out) + to_samples(other), found)
    assert [float(r.weights.sum()) for r in rows] == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


T, M, X = StopReason.TERMINATED, StopReason.MAX_TURNS, StopReason.EPISODE_TIMEOUT


@pytest.mark.parametrize(
    ("truncated", "reasons", "expected"),
    [
        ("train", (T, T, M), [2 / 3, -1 / 3, -1 / 3]),
        ("mask", (T, T, M), [2 / 3, -1 / 3, None]),  # in the baseline, not trained
        ("drop", (T, T, M), [0.5, -0.5, None]),  # in neither
        ("train", (T, T, X), [0.5, -0.5, None]),
        ("train", (T, T, StopReason.ENV_TRUNCATED), [2 / 3, -1 / 3, -1 / 3]),
        ("train", (T, T, StopReason.INVALID_ACTION_LIMIT), [2 / 3, -1 / 3, -1 / 3]),
        ("train", (T, T, StopReason.ENGINE_FAILURE), [0.5, -0.5, None]),
        ("train", (T, T, StopReason.ENGINE_ABORT), [0.5, -0.5, None]),
        ("drop", (M, M, M), [None, None, None]),
        ("drop", (T, M, M), [0.0, None, None]),  # one member left: nothing to compare with
    ],
)
def test_who_is_in_the_baseline_and_who_is_trained(truncated, reasons, expected):
    found = values(group_of(1, 0, 0, reasons=reasons), "dr_grpo", truncated)
    assert found == [e if e is None else pytest.approx(e) for e in expected]


def test_a_list_of_trajectories_is_a_group():
    group = group_of(1.0, 0.0, 0.5)
    assert group_advantages([list(group.trajectories)]) == group_advantages([group])


def test_an_unknown_estimator_is_refused_in_one_sentence():
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        group_advantages([], "grop")


def test_the_score_adds_step_rewards_and_weighted_components_without_those_that_abstained():
    from agentrl.types import Action, Turn

    t = trajectory(turns=[Turn(0, 0, 1, Action("x"), reward=0.25), Turn(1, 0, 1, Action("y"), reward=-1.0)])
    object.__setattr__(t, "rewards", {"a": 1.0, "b": None, "c": 2.0})
    object.__setattr__(t, "weights", {"a": 0.5, "b": 100.0, "c": 0.0})
    assert t.score == -0.75 + 0.5


@pytest.mark.parametrize("score", [1e155, -1e155, 1e308, math.inf, math.nan])
@pytest.mark.parametrize("estimator", GROUP)
def test_a_score_beyond_float32_is_one_sentence(score, estimator):
    with pytest.raises(DataError, match=r"episode \S+ scored \S+; a score must be finite and at most 1e\+36"):
        values(group_of(score, 0, 0), estimator)


@pytest.mark.parametrize("estimator", GROUP)
def test_scores_of_the_largest_size_make_finite_advantages(estimator):
    assert all(abs(v) < 3e38 for v in values(group_of(1e36, -1e36, 0), estimator))
