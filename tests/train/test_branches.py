"""Branched episodes as training data: each token in one row, with the weight and advantage of independent rows, and an unbiased gradient."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
from bigram import Bigram, made_batches, tree
from doubles import OBSERVATION, PROMPT, SAMPLED, span, trajectory

from agentrl.train.advantage import compare
from agentrl.train.rows import split_steps
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows, step_record
from agentrl.types import Action, Group, Task, Turn

BUDGET = 1024
"""the default response budget"""
SHARES = {"0-0": 1 / 6, "1-0": 1.0, "b1": 1 / 3, "b2": 1 / 3, "c1": 1 / 6}
"""of the episodes of `tree`: two branches at turn 1, then one at turn 2"""


def sampled(t, *, before=99):
    """Places (turn, number in the episode) of the sampled tokens of turns before one."""
    turns = [s.turn for g in t.segments for s in g.spans if s.provenance is SAMPLED for _ in s.ids]
    return [(turn, i) for i, turn in enumerate(turns) if turn < before]


@pytest.mark.parametrize("normalisation", ["constant", "token", "sequence"])
def test_a_token_weighs_what_independent_rows_of_the_whole_episodes_that_hold_it_add_up_to(normalisation):
    groups = tree()
    settings = {"advantage_estimator": "dr_grpo" if normalisation == "constant" else "grpo", "entropy_coef": 0.1}
    (rows,) = made_batches(
        groups, Bigram.random(1), settings | {"calculate_per_token_loss": normalisation == "token"}
    ).policy
    members = {t.episode_id: t for t in groups[0].trajectories}
    trunk = members["0-0"]
    independent = {e: {} for e in members}
    for name, t in members.items():
        shared = sampled(trunk, before=t.branch_turn) if t.parent else []
        places = [("0-0", i) for _, i in shared]
        places += [(name, i) for turn, i in sampled(t) if turn >= t.branch_turn]
        for e, i in places:
            each = SHARES[name] / (len(places) if normalisation == "sequence" else 1)
            independent[e][i] = independent[e].get(i, 0.0) + each
    total = {"constant": 2 * BUDGET, "sequence": 2}.get(normalisation) or sum(
        sum(d.values()) for d in independent.values()
    )
    found = {r.source[0]: r.weights[r.weights != 0] for r in rows}
    for e, weights in independent.items():
        np.testing.assert_allclose(found[e], [w / total for _, w in sorted(weights.items())], rtol=1e-6)
    if normalisation == "sequence":
        assert sum(float(w.sum()) for w in found.values()) == pytest.approx(1.0)


def test_weights_that_differ_in_a_row_are_recorded_and_rebuilt():
    groups = tree()
    (rows,) = made_batches(groups, Bigram.random(1), {"advantage_estimator": "grpo"}).policy
    trainer = SimpleNamespace(copies=1, micro_batch_tokens=64, micro_batch_rows=None, multiple=1, tree_packing=True)
    samples = {t.episode_id: to_samples(t) for t in groups[0].trajectories}
    again = rebuild_rows(step_record(rows, trainer), lambda episode, segment: samples[episode][segment])
    assert len(set(rows[0].weights[rows[0].weights > 0].tolist())) == 3
    for a, b in zip(again, rows, strict=True):
        assert a.weights.tobytes() == b.weights.tobytes()
        assert a.advantages.tobytes() == b.advantages.tobytes()


def test_shares_of_a_tree_add_up_to_1_and_follow_its_branching_turns():
    made = compare(tree())
    assert {t.episode_id: s for t, s in zip(made.trajectories, made.data.shares(), strict=True)} == pytest.approx(
        SHARES
    )


def test_a_tree_is_never_split_between_optimizer_steps():
    samples = [s for part in compare(tree()).samples for s in part]
    first, second = split_steps(samples, 2)
    assert {s.episode_id for s in first} == {"0-0", "b1", "b2", "c1"}
    assert {s.episode_id for s in second} == {"1-0"}


# -- the expected gradient, by enumeration -------------------------------------------------------------------------------

FIRST = np.array([0.3, -0.4])
"""logits of the first action"""
SECOND = np.array([[0.2, 0.5], [-0.7, 0.1]])
"""logits of the second action, by the first"""
REWARD = np.array([[1.0, -0.5], [0.25, 2.0]])


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


P1, P2 = softmax(FIRST), np.array([softmax(row) for row in SECOND])


def score(a, b):
    """∇ log π of both actions, as one vector of six logits; `a` or `b` None: of the other alone."""
    gradient = np.zeros(6)
    first, second = a
    if b in ("first", "both"):
        gradient[:2] += np.eye(2)[first] - P1
    if b in ("second", "both"):
        gradient[2 + 2 * first : 4 + 2 * first] += np.eye(2)[second] - P2[first]
    return gradient


def played(index, first, second, **more):
    spans = [
        span(PROMPT, (1,), -1),
        span(SAMPLED, (3 + first,), 0),
        span(OBSERVATION, (2,), 0),
        span(SAMPLED, (5 + second,), 1),
    ]
    turns = [Turn(k, 0, 1 + 2 * k, Action("x")) for k in range(2)]
    return replace(trajectory([spans], index=index, score=float(REWARD[first, second]), turns=turns), **more)


def trees(index, branches):
    """Every tree of an episode with `branches` branches at its second turn, with its probability."""
    for first, *seconds in itertools.product(range(2), repeat=2 + branches):
        more = {"parent": f"{index}-0", "branch_turn": 1}
        members = [played(index, first, seconds[0])]
        members += [played(index, first, s, episode_id=f"b{n}-{index}", **more) for n, s in enumerate(seconds[1:])]
        yield P1[first] * np.prod([P2[first, s] for s in seconds]), members


def step_gradient(members):
    """Σ weight × advantage × ∇ log π over the rows of a step."""
    (group,) = [Group(0, Task("x", "x"), tuple(members))]
    batches = made_batches([group], Bigram.random(1), {"advantage_estimator": "branch_rloo"}).policy
    total = np.zeros(6)
    for row in (r for rows in batches for r in rows):
        actions = row.tokens[1] - 3, row.tokens[3] - 5
        for at, which in ((1, "first"), (3, "second")):
            total += float(row.weights[at]) * float(row.advantages[at]) * score(actions, which)
    return total


@pytest.mark.parametrize("branches", [(1, 1), (2, 0)])
def test_the_expected_gradient_of_branch_rloo_is_that_of_the_expected_reward(branches):
    """Also where one episode of the group has branches and the other has none."""
    exact = sum(P1[a] * P2[a, b] * REWARD[a, b] * score((a, b), "both") for a in range(2) for b in range(2))
    expected = np.zeros(6)
    for (p, one), (q, other) in itertools.product(trees(0, branches[0]), trees(1, branches[1])):
        expected += p * q * step_gradient([*one, *other])
    np.testing.assert_allclose(expected * BUDGET, exact, rtol=1e-4, atol=1e-6)
