"""`agentrl replay`: run recorded episodes through today's code. Exit status 1 if one differs."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson

from agentrl.cli.common import Commands, chosen_entries, print_note, print_now, runner_of
from agentrl.cli.flags import read_given
from agentrl.errors import ConfigError, suggest
from agentrl.replay.parallel_replay import ReplayJob, replay_entries
from agentrl.replay.playback import EveryTool
from agentrl.replay.replayer import Tally
from agentrl.run.components import Components
from agentrl.run.resolve import resolve_recorded
from agentrl.store import IndexEntry, Recording, from_record
from agentrl.store.json_lines import read_json_lines

RESULT = "replay.jsonl"
"""Result of the last replay of a run, in its folder; `agentrl view` shows it."""


def add_parser(commands: Commands) -> None:
    about = "replay recorded episodes with today's code, without an engine; report the first turn and token that differ"
    parser = commands.add("replay", run_replay, about, words="RUN [EPISODE ...]", recorded=True)
    parser.add_argument("episodes", nargs="*", metavar="EPISODE", help="ids of episodes (default: all)")
    tools = parser.add_mutually_exclusive_group()
    live = "call these tools again instead of using their recorded results (without names: all tools)"
    tools.add_argument("--live-tools", nargs="*", default=None, metavar="TOOL", help=live)
    recorded = "call no tool, not even methods of an environment whose state depends on them"
    tools.add_argument("--recorded-tools", action="store_true", help=recorded)
    workers = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=workers, metavar="N", help="processes (default: the CPU cores)")
    out = f"result of each episode, one per line (default: {RESULT} in the run folder, if all were replayed)"
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help=out)


def rollout_seconds(run: Path) -> float:
    """Seconds that a run spent on rollouts and evaluations; 0 if they were not recorded."""
    rows = read_json_lines(run / "timings.jsonl")
    return math.fsum(v for row in rows for k, v in row.items() if k == "rollout_s" or k.startswith("eval/"))


def _check_writable(file: Path) -> None:
    try:
        file.open("ab").close()
    except OSError as e:
        raise ConfigError(f"--out {file} cannot be written: {e.strerror}") from e


def _require_called(recording: Recording, entries: list[IndexEntry], names: Sequence[str]) -> None:
    """Refuse names of tools that the episodes never call.

    Raises:
        ConfigError: there is one.
    """
    episodes = (from_record(record, recording.images) for record in recording.records(entries))
    called = {call.name for t in episodes for turn in t.turns for call in turn.action.calls} if names else set()
    for name in names:
        if name not in called:
            raise ConfigError(
                f"--live-tools {name}: none of the episodes calls a tool of this name{suggest(name, called)}"
            )


def run_replay(args: argparse.Namespace, rest: list[str]) -> int:
    recording = Recording(args.recorded)
    entries = chosen_entries(recording, args.episodes)
    components = Components(resolve_recorded(read_given(args, rest), args.recorded), trains=False)
    if args.out is not None:
        _check_writable(args.out)
    _require_called(recording, entries, args.live_tools or ())
    live = () if args.recorded_tools else None if args.live_tools is None else args.live_tools or EveryTool()
    started = time.perf_counter()
    for each in components.envs.values() or [components]:
        each.make_env()  # loads what its class shares, such as a corpus, before the processes fork
    tally = Tally()
    tally.add(replay_entries(ReplayJob(recording, partial(runner_of, components), live), entries, args.workers))
    seconds = time.perf_counter() - started
    original = rollout_seconds(args.recorded)
    compared = f"; the run spent {original:.1f} s on rollouts and evaluations" if original else ""
    print_now(f"{tally}\n\n{seconds:.1f} s{compared}")
    whole_run = not (args.out or args.episodes) and (args.recorded / "config.toml").exists()
    being_written = print_note(recording, RESULT if whole_run else "")
    out = args.out or (args.recorded / RESULT if whole_run and not being_written else None)
    if out is not None:
        out.write_bytes(b"".join(orjson.dumps(o.to_json(), option=orjson.OPT_APPEND_NEWLINE) for o in tally.outcomes))
    return 1 if tally.differing else 0
