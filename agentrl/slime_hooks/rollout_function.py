"""Rollouts by a function written for slime: `generate_rollout(args, rollout_id, data_source, evaluation=False)`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.errors import ContractError, EnvFailure, Failure, boundary, shown
from agentrl.rollout.failures import CauseTable
from agentrl.slime_hooks.generations import Generations, current
from agentrl.slime_hooks.modules import LOOP
from agentrl.slime_hooks.runner import SlimeRunner
from agentrl.slime_hooks.sample import SlimeSample, samples_in
from agentrl.train.sample import Sample
from agentrl.types import EpisodeSpec, Group, Status, Trajectory

GetSpecs = Callable[[int], list[list[EpisodeSpec]]]
"""the next N groups of the run's data source"""


class DataBuffer:
    """The `data_source` of a rollout function: hands out groups of samples whose prompts are rendered."""

    def __init__(self, get_specs: GetSpecs, runner: SlimeRunner, generations: Generations) -> None:
        self._get_specs, self._runner, self._generations = get_specs, runner, generations
        self.specs: dict[int, EpisodeSpec] = {}
        """what was handed out, by the index of its sample"""

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """The next groups, each with one pending sample for each episode."""
        groups = []
        for specs in self._get_specs(num_samples):
            group = []
            for spec in specs:
                sample, own = self._runner.begin(spec)
                self._generations.prompts |= own.prompts
                self.specs[spec.index] = spec
                group.append(sample)
            groups.append(group)
        return groups

    def add_samples(self, samples: Sequence[Any]) -> None:
        """Refuse unfinished groups, which are not kept from one rollout to the next.

        Raises:
            ContractError: there is one.
        """
        if samples:
            raise ContractError(
                "--rollout-function-path: data_source.add_samples is not supported; return every group that get_samples handed out"
            )


async def play_rollout(
    function: Callable[..., Any], runner: SlimeRunner, get_specs: GetSpecs, step: int
) -> tuple[list[Group], CauseTable]:
    """Call a rollout function once; returns its groups, scored, and the table of causes.

    Raises:
        ContractError: the function raised, or did not return groups of samples that it was given.
    """
    generations = Generations(
        engine=runner.engine,
        renderer=runner.renderer,
        sampling=runner.sampling,
        seeds=(runner.seed, "rollout", step),
        session=f"rollout-{step}",
        context_length=runner.limits.context_length,
    )
    buffer = DataBuffer(get_specs, runner, generations)
    try:
        returned = await _call(function, runner, step, buffer, generations)
    finally:
        await runner.engine.release(generations.session)
    groups: list[Group] = []
    causes = CauseTable()
    for members in _groups(getattr(returned, "samples", returned)):
        scored = [await _trajectory(runner, buffer, samples, generations) for samples in members]
        kept = [t for t in scored if t.status not in (Status.FAILED, Status.ABORTED)]
        if kept:
            kept = await runner.scorer.score_group(kept)
        for t in scored:
            causes.add(t)
        if len(kept) > 1:
            groups.append(Group(kept[0].group_index, kept[0].task, tuple(kept)))
        else:
            causes.dropped_groups += 1
    return groups, causes


async def _call(
    function: Callable[..., Any], runner: SlimeRunner, step: int, buffer: DataBuffer, generations: Generations
) -> Any:
    """Call the function; a sync one runs in a thread, and its requests in the loop of the run."""
    token = current.set(generations)
    LOOP.loop = asyncio.get_running_loop()
    try:
        with boundary(EnvFailure, "rollout function"):
            if inspect.iscoroutinefunction(function):
                return await function(runner.args, step, buffer, evaluation=False)
            return await asyncio.to_thread(function, runner.args, step, buffer, evaluation=False)
    except Failure as e:
        raise ContractError(f"--rollout-function-path: {e}") from e
    finally:
        LOOP.loop = None
        current.reset(token)


def _groups(returned: object) -> list[list[list[Sample]]]:
    """For each group, the samples of each episode."""
    if not isinstance(returned, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in returned):
        raise ContractError(
            f"the rollout function must return a list of groups of samples, found {type(returned).__name__}: {shown(returned)}"
        )
    groups = []
    for group in returned:
        members = [samples_in(item) for item in group]
        if wrong := next((m for m in members if isinstance(m, str)), None):
            raise ContractError(f"the rollout function returned {wrong} in a group, expected a Sample")
        groups.append([m for m in members if not isinstance(m, str)])
    return groups


async def _trajectory(
    runner: SlimeRunner, buffer: DataBuffer, samples: Sequence[Sample], generations: Generations
) -> Trajectory:
    index = samples[-1].index
    spec = buffer.specs.get(-1 if index is None else index)
    if spec is None:
        raise ContractError(
            f"the rollout function returned a sample of index {index}, which get_samples did not hand out"
        )
    seed = derive_seed(runner.seed, spec.index, spec.attempt)
    return await runner.score(runner.trajectory(spec, seed, samples, generations.exchanges))
