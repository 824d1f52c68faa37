"""Shorter jobs than training, on the same components: rollouts alone, one evaluation, training alone on recorded episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.core.name_syntax import split_slice
from agentrl.errors import DataError
from agentrl.rollout.failures import CauseTable
from agentrl.run.collector import Collected
from agentrl.run.components import Components
from agentrl.run.metrics import rollout_metrics
from agentrl.run.training import Job, Print
from agentrl.store import IndexEntry, Recording, exactness_violations, from_record
from agentrl.types import Group, Status, Trajectory


async def rollout_only(config: Config, *, out: Print = print) -> Path:
    """`num_rollout` rollouts, recorded, no trainer; says the mean reward of each and the table of causes."""
    components = Components(config, trains=False)
    await components.require_env()
    job = Job(components, None, out)
    try:
        await job.start_engine()
        for step in range(config.rollout.num_rollout):
            await job.rollout(step)
            job.row |= {"train/rows": 0}
            job.record(step)
        job.report.finish(job.folder.path, config)
        out(job.report.closing(job.folder.path))
    finally:
        await job.close()
    return job.folder.path


async def evaluate_only(config: Config, *, out: Print = print) -> dict[str, float]:
    """One evaluation of the model as it is, on `--eval-prompt-data`, else on `--prompt-data`, else on the environment's split 'test'.

    Returns the numbers of the last set.

    Raises:
        DataError: there is no question.
    """
    given, data = config.eval.eval_prompt_data, config.data.prompt_data
    if data and not given:
        given = (Path(split_slice(data)[0]).stem, data)
    config = replace(config, eval=replace(config.eval, eval_interval=1, eval_prompt_data=given))
    components = Components(config, trains=False)
    await components.require_env()
    job = Job(components, None, out, evaluates=True)
    try:
        await job.start_engine()
        await job.evaluate(0)
        job.report.finish(job.folder.path, config)
        out(job.report.closing(job.folder.path))
    finally:
        await job.close()
    return next((rows[-1][1] for rows in job.report.evals.values()), {})


async def train_only(config: Config, source: Path, *, out: Print = print) -> Path:
    """The RL losses over the recorded train episodes of `source`, rollout by rollout as they were made; no engine, no new episode.

    Raises:
        DataError: no episode in it can be trained on.
    """
    recording = Recording(source)
    rollouts = list(recorded_rollouts(recording, config.rollout.rollout_batch_size))
    if not rollouts:
        raise DataError(f"{source}: no episode of the train split in it")
    job = Job(Components(config), None, out)
    if recording.note:
        out(recording.note)
    try:
        job.trainer = await asyncio.to_thread(
            job.components.trainer, job.folder.path, reference=config.train.use_kl_loss
        )
        for step, entries in enumerate(rollouts):
            found = _read(job, recording, entries, step)
            job.row, job.seconds = rollout_metrics(*found), {}
            job.report.count(*found)
            await job.optimize(found.groups)
            job.record(step)
        await job.save(len(rollouts), recorded=True)
        await job.finish()
    finally:
        await job.close()
    return job.folder.path


def recorded_rollouts(recording: Recording, batch: int) -> Iterator[list[IndexEntry]]:
    """Entries of train episodes by the rollout that made them; of those that name none, `batch` groups at a time."""
    steps: dict[Any, list[IndexEntry]] = {}
    order: dict[int, int] = {}
    for e in recording.episodes:
        if e.split in ("train", ""):
            step = e.step if e.step is not None else ("batch", order.setdefault(e.group, len(order)) // batch)
            steps.setdefault(step, []).append(e)
    yield from steps.values()


def _read(job: Job, recording: Recording, entries: list[IndexEntry], step: int) -> Collected:
    """A recorded rollout; all its episodes go into the new run's record."""
    table, violations = CauseTable(), 0
    members: dict[int, list[Trajectory]] = {}
    for record in recording.records(entries):
        t = from_record(record, recording.images)
        table.add(t)
        violations += exactness_violations([t])
        job.folder.episodes.write(t, step=step, split="train", config=record.get("config"))
        if t.status not in (Status.FAILED, Status.ABORTED):
            members.setdefault(t.group_index, []).append(t)
    return Collected([Group(g, ts[0].task, tuple(ts)) for g, ts in members.items()], table, violations)
