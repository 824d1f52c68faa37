"""`agentrl train --train-only`: the RL losses on recorded episodes, rollout by rollout; no engine, no new episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.errors import DataError
from agentrl.rollout.failures import CauseTable
from agentrl.run.collector import CollectedEpisodes
from agentrl.run.components import Components
from agentrl.run.estimator_checks import require_estimator
from agentrl.run.metrics import StageReport, rollout_metrics
from agentrl.run.recorded_ids import RecordedIds
from agentrl.run.run_log import Echo
from agentrl.run.training import TrainingRun
from agentrl.store import IndexEntry, Recording, exactness_violations, from_record
from agentrl.types import Group, Status, Trajectory


async def train_only(config: Config, recorded: Path, *, echo: Echo = print) -> Path:
    """Train on the episodes of the train split in `recorded`; returns the run folder.

    Raises:
        DataError: there are none, or the model does not have their token ids.
    """
    require_estimator(config)
    recording = Recording(recorded)
    rollouts = list(recorded_rollouts(recording, config.rollout.rollout_batch_size))
    if not rollouts:
        raise DataError(f"{recorded}: it holds no episodes of the train split")
    components = Components(config)
    components.require_critic()
    ids = RecordedIds(components, recorded)
    for record in recording.records([entry for rollout in rollouts for entry in rollout]):
        ids.check(from_record(record, recording.blobs))
    async with TrainingRun(components, echo=echo, plays="recorded") as run:
        if recording.note:
            run.log.echo(recording.note)
        await run.start_trainer()
        for step, entries in enumerate(rollouts):
            episodes = _copy_rollout(run, recording, entries, step)
            training = await run.optimize(step, episodes.groups)
            run.record(step, StageReport(rollout_metrics(*episodes)), training)
        await run.save(len(rollouts), recorded=True)
        await run.finish()
    return run.folder.path


def recorded_rollouts(recording: Recording, batch_size: int) -> Iterator[list[IndexEntry]]:
    """Entries of train episodes by the rollout that recorded them; those without one in batches of `batch_size` groups."""
    rollouts: dict[Any, list[IndexEntry]] = {}
    group_order: dict[int, int] = {}
    for entry in recording.episodes:
        if entry.split in ("train", ""):
            rollout: Any = entry.step
            if rollout is None:
                rollout = ("batch", group_order.setdefault(entry.group, len(group_order)) // batch_size)
            rollouts.setdefault(rollout, []).append(entry)
    yield from rollouts.values()


def _copy_rollout(
    run: TrainingRun, recording: Recording, entries: Sequence[IndexEntry], step: int
) -> CollectedEpisodes:
    """Read a recorded rollout and write its episodes into the new run."""
    causes, violations = CauseTable(), 0
    episodes: list[Trajectory] = []
    for record in recording.records(list(entries)):
        t = from_record(record, recording.blobs)
        causes.add(t)
        violations += exactness_violations([t])
        run.folder.episodes.write(t, step=step, split="train", config=record.get("config"))
        episodes.append(t)
    groups, causes.dropped_groups = complete_groups(episodes, run.config.rollout.min_group_size)
    collected = CollectedEpisodes(groups, causes, violations)
    run.report.add_episodes(*collected)
    return collected


def complete_groups(attempts: Sequence[Trajectory], min_size: int) -> tuple[list[Group], int]:
    """The groups that the recorded rollout trained on, and the number of those that it dropped.

    A dropped group's survivors are recorded as well; to train on them would change the denominator of all others. The size that a group
    was issued with is the number of its episodes with an attempt, failed ones included.
    """
    issued: dict[int, list[Trajectory]] = {}
    for t in attempts:
        issued.setdefault(t.group_index, []).append(t)
    groups = []
    for index, members in issued.items():
        left = tuple(t for t in members if t.status not in (Status.FAILED, Status.ABORTED))
        if left and len(left) >= min(min_size, len({t.index for t in members})):
            groups.append(Group(index, left[0].task, left))
    return groups, len(issued) - len(groups)
