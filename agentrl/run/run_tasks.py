"""The tasks that a run plays, of one environment or of several: the order of training, the evaluation sets, and what was read."""

from __future__ import annotations

from dataclasses import replace

from agentrl.core.seeds import derive_seed
from agentrl.data.data_source import DataSource, resolve_data_source
from agentrl.data.mixed_source import MixedSource
from agentrl.data.task_sets import EvalSet
from agentrl.errors import ConfigError
from agentrl.run.components import Components


def task_counts(components: Components) -> list[str]:
    """What was read from data files and what of it is used."""
    return [line for each in components.envs.values() or [components] for line in each.tasks.counts]


def training_source(components: Components) -> DataSource | MixedSource:
    """The order of the training tasks.

    Raises:
        DataError: there are none.
    """
    seed = components.config.run.seed
    if not components.envs:
        return _source(components, seed)
    sources = {env: _source(c, derive_seed(seed, "env", i)) for i, (env, c) in enumerate(components.envs.items())}
    return MixedSource(sources, components.shares)


def _source(components: Components, seed: int) -> DataSource:
    shuffle, size = components.config.data.rollout_shuffle, components.config.rollout.n_samples_per_prompt
    name, schedule = components.config.data.data_source_path, components.config.schedule.schedule
    make = resolve_data_source(name)
    if make.add_results is not DataSource.add_results and schedule != "sync":
        raise ConfigError(
            f"--data-source-path {name} chooses tasks by the results of the rollout before; with --schedule {schedule} these come too late: "
            "give --schedule sync"
        )
    return make(components.tasks.training(), n_samples_per_prompt=size, seed=seed, shuffle=shuffle)


def evaluation_sets(components: Components) -> dict[str, EvalSet]:
    """The evaluation sets by name; those of several environments are named `ENV` (the split 'test') or `ENV/NAME`."""
    if not components.envs:
        groups, tasks = components.env_class.eval_groups, components.tasks
        sets = tasks.evaluation()
        return {name: EvalSet(each, groups, samples=tasks.eval_samples.get(name)) for name, each in sets.items()}
    return {
        env if name == "test" else f"{env}/{name}": replace(evaluated, env=env)
        for env, each in components.envs.items()
        for name, evaluated in evaluation_sets(each).items()
    }
