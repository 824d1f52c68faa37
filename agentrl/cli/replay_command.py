"""`agentrl replay RUN [EPISODE …]`: would today's code do the same? Exit status 1 if not."""

from __future__ import annotations

import argparse
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from agentrl.cli.common import add_command, chosen, runner_of, say_note, settings_of
from agentrl.errors import ConfigError
from agentrl.replay.parallel_replay import Work, replay_entries
from agentrl.replay.playback import EveryTool
from agentrl.replay.replayer import Tally
from agentrl.run.components import Components
from agentrl.store import Recording

RESULT = "replay.jsonl"
"""in the run folder: what the last replay of it showed, for `agentrl view`"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = "replay recorded episodes through today's code, without an engine; says the first turn and token that differ, and why"
    sub = add_command(commands, "replay", run_replay, about)
    sub.add_argument("episodes", nargs="*", metavar="EPISODE", help="ids of episodes; none: all")
    tools = sub.add_mutually_exclusive_group()
    again = "call tools again instead of using their recorded results; without names: all"
    tools.add_argument("--live-tools", nargs="*", default=None, metavar="TOOL", help=again)
    never = "call no tool, also not those that are methods of an environment whose episode would differ without them"
    tools.add_argument("--recorded-tools", action="store_true", help=never)
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    sub.add_argument(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help=f"what was found, a line per episode (default: {RESULT} in the run folder, if all were replayed)",
    )


def rollout_seconds(run: Path) -> float:
    """What a run spent on making its episodes; 0 if it does not say."""
    file = run / "timings.jsonl"
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    return math.fsum(v for row in rows for k, v in row.items() if k == "rollout_s" or k.startswith("eval/"))


def _check_writable(file: Path) -> None:
    try:
        file.open("ab").close()
    except OSError as e:
        raise ConfigError(f"replay: --out {file} cannot be written: {e.strerror}") from e


def run_replay(args: argparse.Namespace, rest: list[str]) -> int:
    """`agentrl replay`."""
    recording = Recording(args.recorded)
    entries = chosen(recording, args.episodes)
    components = Components(settings_of(args, rest), trains=False)
    if args.out is not None:
        _check_writable(args.out)
    live = () if args.recorded_tools else None if args.live_tools is None else args.live_tools or EveryTool()
    started = time.perf_counter()
    components.make_env()  # loads what its class shares (a corpus, say) before the processes fork
    tally = Tally()
    tally.add(replay_entries(Work(recording, partial(runner_of, components), live), entries, args.workers))
    seconds = time.perf_counter() - started
    then = rollout_seconds(args.recorded)
    print(
        f"{tally}\n\n{seconds:.1f} s"
        + (f"; the run had spent {then:.1f} s on rollouts and evaluations" if then else "")
    )
    own = None if args.out or args.episodes or not (args.recorded / "config.toml").exists() else args.recorded / RESULT
    written = say_note(recording, RESULT if own else "")
    out = args.out or (None if written else own)
    if out is not None:
        out.write_bytes(b"".join(orjson.dumps(o.to_json(), option=orjson.OPT_APPEND_NEWLINE) for o in tally.outcomes))
    return 1 if tally.differing else 0
