"""Would the checks notice? Three deliberate faults, each put in by hand; the check that must catch it is run with and without."""

from itertools import chain

import numpy as np
import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, FakeGenerator, groups_of, make_runner, play, span, trajectory

import agentrl.train.advantage as advantage_module
import agentrl.train.sample as samples_module
from agentrl import Env, StepResult
from agentrl.errors import InvariantError
from agentrl.reward import Reward
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.train.advantage import group_advantages
from agentrl.train.rows import make_rows
from agentrl.train.sample import to_samples
from agentrl.types import Group, Provenance


class Talk(Env):
    """Two turns."""

    def __init__(self):
        self.steps = 0

    async def step(self, action):
        self.steps += 1
        return StepResult("go on", terminated=self.steps == 2)


def mixed():
    """One segment in which every kind of token has a sampled one beside it."""
    return trajectory(
        [
            [
                span(PROMPT, (1, 2), -1),
                span(SAMPLED, (3, 4)),
                span(Provenance.FORCED, (5,)),
                span(Provenance.TEMPLATE, (6, 7)),
                span(OBSERVATION, (8, 9)),
                span(SAMPLED, (10, 11), 1),
            ]
        ],
        score=1.0,
    )


# -- the mask shifted by one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [1, -1])
async def test_a_mask_shifted_by_one_is_refused_by_the_samples_constructor(monkeypatch, hermes, by):
    t = await play(Talk, ["one", "two"], hermes)
    assert to_samples(t)[0].trained_tokens == t.sampled_tokens  # without the fault
    expand = samples_module._expand

    def shifted(spans, value):
        mask = expand(spans, value)
        return mask[-by:] + mask[:-by]

    monkeypatch.setattr(samples_module, "_expand", shifted)
    for found in (t, mixed()):
        with pytest.raises(InvariantError, match="mask 1 on a token of provenance"):
            to_samples(found)


# -- groups by position ----------------------------------------------------------------------------------------------


def by_position(size):
    """The fault: whatever comes in, every `size` trajectories in a row are a group."""
    right = advantage_module.group_advantages

    def wrong(groups, *args):
        flat = list(chain.from_iterable(g.trajectories for g in groups))
        parts = [flat[i : i + size] for i in range(0, len(flat), size)]
        return right([Group(i, p[0].task, tuple(p)) for i, p in enumerate(parts)], *args)

    return wrong


def grouped_by_id(advantages, groups):
    """The check: with rewards that are equal within each group, nothing has an advantage, whatever became of its members."""
    return all(advantages[t.episode_id] == 0 for g in groups for t in g.trajectories)


async def lossy_groups(hermes):
    """Three groups of four; the first lost a member. The score is the group's number."""
    from agentrl.errors import EngineFailure

    engine = FakeGenerator(hermes, lambda r: EngineFailure("503") if r.session.startswith("1-") else "x")
    runner = make_runner(Talk, engine, hermes, rewards=[Reward(lambda t: float(t.group_index), "group")])
    groups, _ = await Rollout(runner, RolloutLimits(max_retries=0)).run(groups_of(3, 4))
    assert [len(g.trajectories) for g in groups] == [3, 4, 4]
    return groups


async def test_groups_by_position_are_caught_by_equal_rewards_within_each_group(monkeypatch, hermes):
    groups = await lossy_groups(hermes)
    assert grouped_by_id(group_advantages(groups), groups)
    monkeypatch.setattr(advantage_module, "group_advantages", by_position(4))
    assert not grouped_by_id(advantage_module.group_advantages(groups), groups)


async def test_groups_by_position_look_right_as_long_as_none_is_lost(monkeypatch):
    """Why the check above must lose a member: with full groups this fault cannot be seen."""
    groups = [
        Group(g, mixed().task, tuple(trajectory(index=g * 4 + i, group=g, score=float(g)) for i in range(4)))
        for g in range(3)
    ]
    monkeypatch.setattr(advantage_module, "group_advantages", by_position(4))
    assert grouped_by_id(advantage_module.group_advantages(groups), groups)


# -- a token trained that was not sampled ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Provenance.FORCED, Provenance.TEMPLATE, OBSERVATION])
def test_training_a_token_that_was_not_sampled_is_refused_by_the_constructor(monkeypatch, kind):
    to_samples(mixed())
    expand = samples_module._expand
    monkeypatch.setattr(
        samples_module, "_expand", lambda spans, value: expand(spans, lambda s: int(s.provenance in (SAMPLED, kind)))
    )
    with pytest.raises(InvariantError, match=f"mask 1 on a token of provenance {kind.name}"):
        to_samples(mixed())


def test_training_one_that_was_not_sampled_is_refused_again_before_training():
    """The constructor saw a good mask; someone changed it afterwards."""
    (sample,) = to_samples(mixed())
    make_rows([sample], {"0-0": 1.0})
    sample.loss_mask[2] = 1
    with pytest.raises(InvariantError, match="provenance FORCED"):
        make_rows([sample], {"0-0": 1.0})


def test_training_one_that_was_not_sampled_shows_in_the_rows_also_without_provenance():
    """Samples made by hand may lack provenance; then the count of trained tokens still differs from what the engine sampled."""
    t = mixed()
    (sample,) = to_samples(t)
    (row,) = make_rows([sample], {"0-0": 1.0})
    assert np.count_nonzero(row.weights) == t.sampled_tokens
    sample.provenance = []
    sample.loss_mask[2] = 1
    (row,) = make_rows([sample], {"0-0": 1.0})
    assert np.count_nonzero(row.weights) != t.sampled_tokens
    assert any(row.weights[i] > 0 and row.rollout_log_probs[i] == 0 for i in range(len(row.tokens)))
