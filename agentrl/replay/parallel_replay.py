"""A whole run replayed by several processes. They are forked, so that what the parent loaded (tokenizer, corpora) is shared and not loaded again."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.replay.replayer import Outcome, RunnerFor, replay_group
from agentrl.rollout.episode import EpisodeRunner
from agentrl.store import IndexEntry, Recording, from_record

_CHUNK = 8
"""groups that a process takes at once"""


@dataclass
class Work:
    """What every process needs; children get it by the fork."""

    recording: Recording
    runner_for: RunnerFor
    live: Container[str] | None = None
    """see `replay_group`"""


_work: Work | None = None


def groups_of(entries: Sequence[IndexEntry]) -> list[list[IndexEntry]]:
    """Entries by split, rollout and group, in order."""
    groups: dict[tuple[Any, ...], list[IndexEntry]] = {}
    for e in entries:
        groups.setdefault((e.split, e.step, e.group), []).append(e)
    return list(groups.values())


def replay_entries(
    work: Work, entries: Sequence[IndexEntry], workers: int, heard: Callable[[int], None] = lambda n: None
) -> list[Outcome]:
    """Replay entries of a recording; `heard` is told how many were done, again and again."""
    groups = groups_of(entries)
    chunks = [groups[i : i + _CHUNK] for i in range(0, len(groups), _CHUNK)]
    out: list[Outcome] = []
    for done in _results(work, chunks, min(workers, len(chunks))):
        out += done
        heard(len(done))
    return out


def _results(work: Work, chunks: list[list[list[IndexEntry]]], workers: int) -> Iterator[list[Outcome]]:
    global _work  # the children's copy of `work`: an EpisodeRunner cannot be pickled
    if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (_replay(work, chunk) for chunk in chunks)
        return
    _work = work
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            yield from pool.imap(_in_child, chunks)
    finally:
        _work = None


def _in_child(chunk: list[list[IndexEntry]]) -> list[Outcome]:
    assert _work is not None
    return _replay(_work, chunk)


def _replay(work: Work, groups: list[list[IndexEntry]]) -> list[Outcome]:
    return asyncio.run(_replay_all(work, groups))


async def _replay_all(work: Work, groups: list[list[IndexEntry]]) -> list[Outcome]:
    runners: dict[str, EpisodeRunner] = {}
    out: list[Outcome] = []
    try:
        for group in groups:
            split = group[0].split
            if split not in runners:
                runners[split] = work.runner_for(split)
            out += await replay_group(
                runners[split],
                [from_record(r, work.recording.images) for r in work.recording.records(group)],
                work.live,
                work.recording.outputs,
            )
    finally:
        for runner in runners.values():
            runner.close()
    return out
