"""Rows: weights sum to one over the step, masked samples are in no denominator, episodes stay whole."""

import numpy as np
import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, span, trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InvariantError
from agentrl.train.base import Row
from agentrl.train.rows import NORMALISATIONS, make_rows, rows_with_gradient, split_steps
from agentrl.train.sample import to_samples


def episode(index, lengths, temperature=1.0):
    """One segment per entry; each is the number of sampled tokens of its turns, with an observation after each turn."""
    segments = []
    for turns in lengths:
        spans = [span(PROMPT, (1, 2), -1)]
        for i, n in enumerate(turns):
            spans += [span(SAMPLED, range(10, 10 + n), i, 1, temperature), span(OBSERVATION, (7, 8), i)]
        segments.append(spans)
    return to_samples(trajectory(segments, index=index, score=float(index)))


EPISODES = st.lists(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=6
)


@given(EPISODES, st.sampled_from(("sequence", "token")), st.data())
def test_weights_sum_to_one_over_the_step_whatever_is_masked(episodes, normalisation, data):
    samples = [s for i, e in enumerate(episodes) for s in episode(i, e)]
    for s in samples:
        s.remove_sample = data.draw(st.booleans())
    trained = {s.episode_id for s in samples if data.draw(st.booleans())}
    advantages = dict.fromkeys(trained, 1.0)
    rows = make_rows(samples, advantages, normalisation)
    used = [s for s in samples if s.episode_id in advantages and not s.remove_sample]
    assert len(rows) == len(used)
    if not used:
        return
    assert sum(float(r.weights.sum()) for r in rows) == pytest.approx(1, abs=1e-5)
    by_episode = {}
    for s, r in zip(used, rows, strict=True):
        by_episode.setdefault(s.episode_id, []).append(r)
        assert (r.weights > 0).tolist() == [False] * (len(s.tokens) - s.response_length) + [m == 1 for m in s.loss_mask]
        assert len(set(r.weights[r.weights > 0].tolist())) == 1
    if normalisation == "sequence":
        for found in by_episode.values():  # each episode the same, over all its segments
            assert sum(float(r.weights.sum()) for r in found) == pytest.approx(1 / len(by_episode), abs=1e-5)
    else:
        assert len({float(r.weights.max()) for r in rows}) == 1


@given(EPISODES, st.integers(1, 5000))
def test_with_a_constant_all_tokens_of_a_step_weigh_the_same_whatever_is_sampled(episodes, constant):
    samples = [s for i, e in enumerate(episodes) for s in episode(i, e)]
    rows = make_rows(samples, {s.episode_id: 1.0 for s in samples}, "constant", constant=constant)
    weights = {float(w) for r in rows for w in r.weights if w}
    assert weights == {float(np.float32(1.0 / (len(episodes) * constant)))}


@given(EPISODES, st.sampled_from(NORMALISATIONS))
def test_a_fully_masked_sample_changes_nothing(episodes, normalisation):
    samples = [s for i, e in enumerate(episodes) for s in episode(i, e)]
    advantages = {s.episode_id: 1.0 for s in samples} | {"99-0": 1.0}
    (masked,) = episode(99, [[3]])
    masked.remove_sample = True
    (empty,) = episode(98, [[3]])
    empty.loss_mask = [0] * empty.response_length
    with_them = make_rows([masked, *samples, empty], advantages | {"98-0": 1.0}, normalisation)
    without = make_rows(samples, advantages, normalisation)
    assert len(with_them) == len(without)
    assert all((a.weights == b.weights).all() for a, b in zip(with_them, without, strict=True))


def test_a_row_is_aligned_with_its_tokens():
    (s,) = episode(3, [[2, 1]], temperature=0.7)
    (row,) = make_rows([s], {"3-0": -2.0})
    assert row.tokens.tolist() == s.tokens == [1, 2, 10, 11, 7, 8, 10, 7, 8]
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0, 0])
    assert (row.weights > 0).astype(int).tolist() == mask.tolist()
    assert row.advantages.tolist() == (-2.0 * mask).tolist()
    assert row.rollout_log_probs[2:].tolist() == pytest.approx(s.rollout_log_probs)
    assert (row.rollout_log_probs != 0).astype(int).tolist() == mask.tolist()
    assert row.temperature.tolist() == pytest.approx([0.7 if m else 1.0 for m in mask])
    assert row.sampled.tolist() == mask.astype(bool).tolist()


def test_a_sampled_token_is_one_by_provenance_whatever_its_log_prob():
    (s,) = episode(3, [[2, 1]])
    s.rollout_log_probs = [0.0] * s.response_length
    assert make_rows([s], {"3-0": 1.0})[0].sampled.tolist() == [False, False, *(m == 1 for m in s.loss_mask)]
    s.provenance = []
    assert make_rows([s], {"3-0": 1.0})[0].sampled.tolist() == [False, False, *(m == 1 for m in s.loss_mask)]
    s.rollout_log_probs = None
    assert not make_rows([s], {"3-0": 1.0})[0].sampled.any()


def test_an_episode_without_an_advantage_is_in_no_denominator():
    rows = make_rows([*episode(0, [[2]]), *episode(1, [[3]])], {"0-0": 1.0})
    assert [float(r.weights.sum()) for r in rows] == [1.0]


def test_a_sample_that_contradicts_itself_is_refused():
    (s,) = episode(0, [[2]])
    s.loss_mask.append(1)
    with pytest.raises(InvariantError, match="loss_mask"):
        make_rows([s], {"0-0": 1.0})


def test_the_same_segment_twice_is_refused():
    (s,) = episode(0, [[2]])
    with pytest.raises(InvariantError, match="twice"):
        make_rows([s, s], {"0-0": 1.0})


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(InvariantError, match="'sequence', 'token', 'constant'"):
        make_rows([], {}, "mean")


@given(EPISODES, st.integers(1, 8), st.randoms())
def test_any_split_into_steps_keeps_episodes_whole_in_order_of_their_ordinals(episodes, steps, random):
    samples = [s for i, e in enumerate(episodes) for s in episode(i, e)]
    random.shuffle(samples)
    parts = split_steps(samples, steps)
    assert len(parts) == min(steps, len(episodes))
    where = {}
    for k, part in enumerate(parts):
        assert part, "no empty step"
        for s in part:
            assert where.setdefault(s.episode_id, k) == k
    assert [s.index for part in parts for s in part] == sorted(s.index for s in samples)
    assert {id(s) for part in parts for s in part} == {id(s) for s in samples}
    sizes = [len({s.episode_id for s in part}) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_rows_without_an_advantage_are_left_out_only_where_nothing_else_is_learned():
    rows = make_rows([*episode(0, [[2]]), *episode(1, [[3]])], {"0-0": 0.0, "1-0": 1.0})
    assert len(rows_with_gradient(rows, keep_flat=True)) == 2
    (kept,) = rows_with_gradient(rows, keep_flat=False)
    assert float(kept.weights.sum()) == pytest.approx(0.5), "the denominator still counts both"


def ones(n):
    return np.ones(n, np.float32)


@pytest.mark.parametrize(
    "name", ["weights", "advantages", "rollout_log_probs", "temperature", "old_log_probs", "ref_log_probs"]
)
@pytest.mark.parametrize(
    "bad",
    [ones(2), ones((3, 1)), np.array([0, np.nan, 0], np.float32), np.array([0, np.inf, 0], np.float32)],
    ids=["short", "2d", "nan", "inf"],
)
def test_a_row_refuses(name, bad):
    fields = {n: np.zeros(3, np.float32) for n in ("weights", "advantages", "rollout_log_probs", "temperature")}
    with pytest.raises(InvariantError, match=f"Row.{name}"):
        Row(**{"tokens": np.arange(3, dtype=np.int32), **fields, name: bad})


def test_a_row_refuses_a_first_token_that_is_trained():
    zeros = np.zeros(2, np.float32)
    tokens = np.arange(2, dtype=np.int32)
    with pytest.raises(InvariantError, match="no context"):
        Row(tokens=tokens, weights=ones(2), advantages=zeros, rollout_log_probs=zeros, temperature=ones(2))
