"""`--data-source-path solve_rate`: which tasks are drawn, by which results; resumed exactly; refused where results come too late."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from doubles import EMBEDDED, trajectory

from agentrl import Task
from agentrl.config import build_config
from agentrl.data.curriculum import LEAST, SolveRateSource
from agentrl.data.data_source import DataSource, resolve_data_source
from agentrl.data.mixed_source import MixedSource
from agentrl.errors import ConfigError
from agentrl.run.components import Components
from agentrl.run.run_tasks import training_source
from agentrl.types import Group

TASKS = [Task(f"t{i}", "") for i in range(10)]


def source(tasks=TASKS, seed=0):
    return SolveRateSource(tasks, n_samples_per_prompt=4, seed=seed)


def results(specs, solved, env=""):
    """The group of specs, of which the first `solved` episodes scored 1."""
    members = [replace(trajectory(index=s.index, score=float(i < solved)), env=env) for i, s in enumerate(specs)]
    return Group(specs[0].group_index, specs[0].task, tuple(members))


def play(made, rollouts, solved=lambda task: 2):
    drawn = []
    for _ in range(rollouts):
        groups = made.get_samples(4)
        drawn += [g[0].task.id for g in groups]
        made.add_results([results(g, solved(g[0].task)) for g in groups])
    return drawn


def test_tasks_that_are_solved_half_of_the_time_come_most_often():
    made = source()
    counts = Counter(play(made, 200, lambda task: {"t0": 2, "t1": 4, "t2": 0}.get(task.id, 4)))
    assert made.rates["t0"] == 0.5
    assert (made.rates["t1"], made.rates["t2"]) == (1.0, 0.0)
    assert made.weight("t1") == made.weight("t2") == LEAST
    others = [counts[f"t{i}"] for i in range(1, 10)]
    assert counts["t0"] > 1.5 * max(others)
    assert min(others) > 0, "none is left out for ever"


def test_a_new_result_counts_half():
    made = source(TASKS[:1])
    for solved, rate in ((4, 1.0), (0, 0.5), (0, 0.25), (2, 0.375)):
        (group,) = made.get_samples(1)
        made.add_results([results(group, solved)])
        assert made.rates["t0"] == rate


def test_a_rollout_repeats_no_task_before_all_were_drawn():
    groups = source().get_samples(25)
    for first in (0, 10):
        assert len({g[0].task.id for g in groups[first : first + 10]}) == 10
    assert [s.index for g in groups for s in g] == list(range(100))
    assert [g[0].group_index for g in groups] == list(range(25))


def test_draws_follow_from_seed_and_results_and_are_resumed_exactly():
    whole = source()
    expected = play(whole, 12)
    assert play(source(), 12) == expected
    assert play(source(seed=1), 12) != expected
    assert play(source(), 12, lambda task: 4 * (task.id == "t0")) != expected
    first, second = source(), source()
    played = play(first, 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert played + play(second, 7) == expected


def test_tasks_that_are_given_back_come_first():
    made = source()
    groups = made.get_samples(3)
    made.add_samples(groups[1:])
    assert [g[0].task.id for g in made.get_samples(2)] == [g[0].task.id for g in groups[1:]]


def test_each_environment_has_its_own_rates_and_the_shares_stay_exact():
    def sources():
        made = {
            "a": source(seed=1),
            "b": source(TASKS[:3], seed=2),
            "c": DataSource(TASKS, n_samples_per_prompt=4, seed=3),
        }
        return MixedSource(made, {"a": 0.5, "b": 0.3, "c": 0.2})

    mixed = sources()
    for _ in range(5):
        groups = mixed.get_samples(10)
        assert Counter(g[0].env for g in groups) == {"a": 5, "b": 3, "c": 2}
        mixed.add_results([results(g, 4 if g[0].env == "a" else 0, g[0].env) for g in groups])
    assert set(mixed.sources["a"].rates.values()) == {1.0}
    assert set(mixed.sources["b"].rates.values()) == {0.0}
    again = sources()
    again.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    assert [g[0].task.id for g in again.get_samples(20)] == [g[0].task.id for g in mixed.get_samples(20)]


def test_it_has_a_name_and_needs_results_before_the_next_rollout():
    assert resolve_data_source("solve_rate") is SolveRateSource
    settings = {"hf_checkpoint": str(EMBEDDED), "env": "search_r1", "data_source_path": "solve_rate", "data_limit": 4}
    made = Components(build_config(settings | {"schedule": "async"}), trains=False)
    with pytest.raises(ConfigError, match="give --schedule sync"):
        training_source(made)
    assert isinstance(training_source(Components(build_config(settings), trains=False)), SolveRateSource)
