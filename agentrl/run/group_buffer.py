"""The groups of a window in a checkpoint: those that wait to be trained on with their episodes, those in flight with their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.errors import DataError, StoreError
from agentrl.rollout.failures import CauseTable
from agentrl.run.group_player import PlayedGroup
from agentrl.store import decode, encode, from_record, to_record
from agentrl.types import EpisodeSpec, Group, Task, Trajectory

FILE = "buffer.jsonl"
"""name of the file in a checkpoint"""


def write_buffer(specs: Mapping[int, Sequence[EpisodeSpec]], outcomes: Mapping[int, PlayedGroup]) -> bytes:
    """The file of a checkpoint: a line of JSON for each episode that has finished, and one for each slot after its episodes."""
    lines: list[bytes] = []
    for slot, group in sorted(specs.items()):
        played = outcomes.get(slot)
        lines += [encode(to_record(t, whole=True)) for t in _episodes(played)]
        lines.append(encode({"version": 2, "kind": "slot", "slot": slot, **_slot(group, played)}))
    return b"".join(lines)


def _episodes(played: PlayedGroup | None) -> Iterable[Trajectory]:
    return () if played is None else (*played.attempts, *played.refused)


def _slot(group: Sequence[EpisodeSpec], played: PlayedGroup | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "task": group[0].task.id,
        "env": group[0].env,
        "group": group[0].group_index,
        "episodes": [(spec.index, spec.attempt) for spec in group],
    }
    if played is not None:
        record |= {
            "attempts": len(played.attempts),
            "members": None if played.group is None else [t.episode_id for t in played.group.trajectories],
            "causes": played.causes.rows(),
            "retried": played.causes.retried,
            "dropped_groups": played.causes.dropped_groups,
        }
    return record


def read_buffer(
    content: bytes, tasks: Mapping[str, Iterable[Task]], where: object
) -> tuple[dict[int, list[EpisodeSpec]], dict[int, PlayedGroup]]:
    """The groups of all slots, and what became of those that have finished.

    Args:
        content: what `write_buffer` returned.
        tasks: all tasks of each environment by its label, which is empty in a run of one.
        where: names the file in errors.

    Raises:
        DataError: a task is missing.
        StoreError: the file is damaged.
    """
    by_id = {(env, task.id): task for env, own in tasks.items() for task in own}
    specs: dict[int, list[EpisodeSpec]] = {}
    outcomes: dict[int, PlayedGroup] = {}
    episodes: list[Trajectory] = []
    for line in content.splitlines():
        record = decode(line, where)
        if record["kind"] != "slot":
            episodes.append(from_record(record))
            continue
        slot, env = record["slot"], record["env"]
        task = by_id.get((env, record["task"]))
        if task is None:
            raise DataError(f"{where}: task {record['task']!r} is not in the data any more; resume with the same data")
        specs[slot] = [
            EpisodeSpec(task, record["group"], index, attempt, env=env) for index, attempt in record["episodes"]
        ]
        if "attempts" in record:
            outcomes[slot] = _outcome(record, task, episodes, where)
        episodes = []
    return specs, outcomes


def _outcome(record: Mapping[str, Any], task: Task, episodes: Sequence[Trajectory], where: object) -> PlayedGroup:
    causes = CauseTable(retried=record["retried"], dropped_groups=record["dropped_groups"])
    for reason, cause, count in record["causes"]:
        causes.counts[reason, cause] = count
    group, by_id = None, {t.episode_id: t for t in episodes}
    if record["members"] is not None:
        missing = [name for name in record["members"] if name not in by_id]
        if missing:
            raise StoreError(f"{where}: slot {record['slot']} has no episode {missing[0]}; is the file complete?")
        group = Group(record["group"], task, tuple(by_id[name] for name in record["members"]))
    attempts = record["attempts"]
    return PlayedGroup(
        group=group, attempts=tuple(episodes[:attempts]), refused=tuple(episodes[attempts:]), causes=causes
    )
