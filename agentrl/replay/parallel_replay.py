"""Replay of a whole run by several processes. They are forked, so that they share what the parent loaded (tokenizer, corpora)."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.replay.replayer import Outcome, RunnerFor, replay_group
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.store import IndexEntry, Recording, from_record

_GROUPS_PER_JOB = 8


@dataclass
class ReplayJob:
    """What every process needs; children inherit it by the fork."""

    recording: Recording
    runner_for: RunnerFor
    live: Container[str] | None = None
    """see `replay_group`"""


_job: ReplayJob | None = None


def groups_of(entries: Sequence[IndexEntry]) -> list[list[IndexEntry]]:
    """Entries by split, rollout and group, in order."""
    groups: dict[tuple[Any, ...], list[IndexEntry]] = {}
    for e in entries:
        groups.setdefault((e.split, e.step, e.group), []).append(e)
    return list(groups.values())


def replay_entries(
    job: ReplayJob, entries: Sequence[IndexEntry], workers: int, on_progress: Callable[[int], None] = lambda count: None
) -> list[Outcome]:
    """Replay entries of a recording; `on_progress` is called with the number of episodes replayed since its last call."""
    groups = groups_of(entries)
    chunks = [groups[i : i + _GROUPS_PER_JOB] for i in range(0, len(groups), _GROUPS_PER_JOB)]
    outcomes: list[Outcome] = []
    for part in _results(job, chunks, min(workers, len(chunks))):
        outcomes += part
        on_progress(len(part))
    return outcomes


def _results(job: ReplayJob, chunks: list[list[list[IndexEntry]]], workers: int) -> Iterator[list[Outcome]]:
    global _job  # inherited by the children, since an EpisodeRunner cannot be pickled
    if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (_replay(job, chunk) for chunk in chunks)
        return
    _job = job
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            yield from pool.imap(_replay_in_child, chunks)
    finally:
        _job = None


def _replay_in_child(chunk: list[list[IndexEntry]]) -> list[Outcome]:
    assert _job is not None
    return _replay(_job, chunk)


def _replay(job: ReplayJob, groups: list[list[IndexEntry]]) -> list[Outcome]:
    return asyncio.run(_replay_groups(job, groups))


async def _replay_groups(job: ReplayJob, groups: list[list[IndexEntry]]) -> list[Outcome]:
    runners: dict[str, EpisodeRunner | MixedRunner] = {}
    outcomes: list[Outcome] = []
    try:
        for group in groups:
            split = group[0].split
            if split not in runners:
                runners[split] = job.runner_for(split)
            members = [from_record(r, job.recording.blobs) for r in job.recording.records(group)]
            outcomes += await replay_group(
                runners[split].for_env(members[0].env), members, job.live, job.recording.outputs
            )
    finally:
        for runner in runners.values():
            runner.close()
    return outcomes
