"""Trajectory -> Samples: the token and mask invariants hold for any spans, and no inconsistent Sample can be made."""

import math
from itertools import chain, pairwise

import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, span, trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InvariantError
from agentrl.train.sample import Sample, to_samples
from agentrl.types import Action, Provenance, Segment, Status, StopReason, Task, Turn

NOT_SAMPLED = (OBSERVATION, Provenance.TEMPLATE, Provenance.FORCED)


@st.composite
def spans(draw, kinds=(SAMPLED, *NOT_SAMPLED)):
    """A prompt, then any spans, as a segment has them."""
    ids = st.lists(st.integers(0, 300), min_size=1, max_size=6)
    out = [span(PROMPT, draw(ids), -1)]
    for turn in range(draw(st.integers(0, 5))):
        out.append(span(draw(st.sampled_from(kinds)), draw(ids), turn, draw(st.integers(0, 3)), 0.7))
    return out


def expand(runs):
    return [v for v, n in runs for _ in range(n)]


@given(st.lists(spans(), min_size=1, max_size=4))
def test_every_per_token_field_follows_from_the_spans(segments):
    t = trajectory(segments)
    samples = {s.segment_index: s for s in to_samples(t)}
    sampled_segments = {i for i, g in enumerate(segments) if any(s.provenance is SAMPLED for s in g)}
    assert (
        set(samples) == sampled_segments
    )  # a segment with nothing to train on gives no sample, the others keep their index
    for i, sample in samples.items():
        response = segments[i][1:]
        per_token = [(s, k) for s in response for k in range(len(s.ids))]
        assert sample.tokens == list(chain.from_iterable(s.ids for s in segments[i]))
        assert sample.response_length == len(per_token) == len(sample.loss_mask) == len(sample.rollout_log_probs)
        assert sample.loss_mask == [int(s.provenance is SAMPLED) for s, _ in per_token]
        assert sample.rollout_log_probs == [s.log_probs[k] if s.log_probs else 0.0 for s, k in per_token]
        assert expand(sample.policy_versions) == [s.policy_version if s.log_probs else -1 for s, _ in per_token]
        assert expand(sample.provenance) == [s.provenance for s, _ in per_token]
        assert expand(sample.turn_of) == [s.turn for s, _ in per_token]
        for runs in (sample.policy_versions, sample.provenance, sample.turn_of):
            assert all(a[0] != b[0] for a, b in pairwise(runs)), "neighbours of equal value are one run"
        assert sample.temperature == 0.7
        assert sample.trained_tokens == sum(sample.loss_mask)


@given(st.lists(spans(), min_size=1, max_size=3))
def test_what_was_sampled_is_trained_exactly_once_over_all_segments(segments):
    t = trajectory(segments)
    assert sum(s.trained_tokens for s in to_samples(t)) == t.sampled_tokens


def test_all_samples_of_an_episode_carry_its_id_reward_and_turn_rewards():
    turns = [Turn(i, 0, 2, Action("x"), reward=r) for i, r in enumerate((0.25, 0.5))]
    segments = [
        [span(PROMPT, (1,), -1), span(SAMPLED, (2,))],
        [span(PROMPT, (1, 2, 3), -1), span(SAMPLED, (4,), 1, version=2)],
    ]
    first, second = to_samples(trajectory(segments, index=7, score=1.0, turns=turns))
    for s in (first, second):
        assert (s.episode_id, s.index, s.reward, s.turn_rewards, s.label) == ("7-0", 7, 1.75, [0.25, 0.5], "Paris")
    assert (first.segment_index, second.segment_index) == (0, 1)
    assert second.weight_versions == ["2"]


@pytest.mark.parametrize("reason", [r for r in StopReason if r.status in (Status.FAILED, Status.ABORTED)])
def test_a_failure_gives_no_samples(reason):
    assert to_samples(trajectory(reason=reason)) == []


@pytest.mark.parametrize("demonstrations", [False, True])
def test_demonstrations_are_trained_only_where_asked_for(demonstrations):
    samples = to_samples(
        trajectory([[span(PROMPT, (1,), -1), span(Provenance.DEMONSTRATION, (2, 3))]]), demonstrations=demonstrations
    )
    assert [s.loss_mask for s in samples] == ([[1, 1]] if demonstrations else [])


def test_the_prompt_of_a_sample_is_not_the_tasks_own_object():
    message = {"role": "user", "content": "a"}
    t = trajectory()
    object.__setattr__(t, "task", Task("x", (message,)))
    (sample,) = to_samples(t)
    sample.prompt[0]["content"] = "changed"
    assert message["content"] == "a"


GOOD = {
    "tokens": [1, 2, 3, 4, 5],
    "response_length": 3,
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-0.5, 0.0, -1.5],
    "policy_versions": [(2, 1), (-1, 1), (2, 1)],
    "provenance": [(1, 1), (2, 1), (1, 1)],
    "turn_of": [(0, 2), (1, 1)],
    "status": Status.COMPLETED,
    "reward": 1.0,
}


def test_a_consistent_sample_is_accepted():
    assert Sample(**GOOD).trained_tokens == 2
    assert Sample(**GOOD, remove_sample=True).trained_tokens == 0
    assert Sample().status is Status.PENDING


BROKEN = [
    ({"status": "completed"}, "status"),
    ({"response_length": -1, "loss_mask": None, "rollout_log_probs": None}, "response_length"),
    ({"response_length": 6}, "response_length"),
    ({"loss_mask": [1, 0]}, "loss_mask"),
    ({"loss_mask": [1, 0, 1, 0]}, "loss_mask"),
    ({"loss_mask": [1, 0, 2]}, "loss_mask"),
    ({"loss_mask": [1, 0, -1]}, "loss_mask"),
    ({"loss_mask": [1, 0, 0.5]}, "loss_mask"),
    ({"loss_mask": [1, 1, 1]}, "OBSERVATION"),
    ({"rollout_log_probs": [-0.5, 0.0]}, "rollout_log_probs"),
    ({"rollout_log_probs": [-0.5, math.nan, -1.0]}, "not finite"),
    ({"rollout_log_probs": [-math.inf, math.inf, -1.0]}, "not finite"),
    ({"policy_versions": [(2, 1), (-1, 1)]}, "policy_versions"),
    ({"policy_versions": [(2, 4), (2, -1)]}, "policy_versions"),
    ({"provenance": [(1, 4)]}, "provenance"),
    ({"provenance": [(9, 3)]}, "provenance"),
    ({"provenance": [(5, 3)]}, "DEMONSTRATION"),
    ({"provenance": [(0, 3)]}, "PROMPT"),
    ({"provenance": [(4, 1), (1, 2)]}, "FORCED"),
    ({"provenance": [(3, 1), (1, 2)]}, "TEMPLATE"),
    ({"turn_of": [(0, 0), (1, 3)]}, "turn_of"),
    ({"reward": math.nan}, "reward"),
    ({"reward": {"a": 1.0, "b": math.inf}}, "reward"),
    ({"reward": "1.0"}, "reward"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
    ({"status": Status.FAILED}, "failed"),
    ({"status": Status.ABORTED}, "aborted"),
]


@pytest.mark.parametrize(("change", "names"), BROKEN, ids=[str(c) for c, _ in BROKEN])
def test_the_constructor_refuses(change, names):
    with pytest.raises(InvariantError, match=names):
        Sample(**{**GOOD, **change})


def test_check_finds_what_was_changed_after_construction():
    sample = Sample(**GOOD)
    sample.loss_mask.append(1)
    with pytest.raises(InvariantError, match="loss_mask"):
        sample.check()


def test_a_segment_is_as_long_as_its_spans():
    segment = Segment((span(PROMPT, (1, 2), -1), span(SAMPLED, (3,))))
    assert len(segment) == 3
    assert segment.ids == [1, 2, 3]
