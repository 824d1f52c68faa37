"""`agentrl fork RUN EPISODE --turn K`: what else could have happened."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

from agentrl.cli.common import add_command, runner_of, say_note, settings_of
from agentrl.errors import ConfigError
from agentrl.replay.fork import Branch, fork, table
from agentrl.run.components import Components
from agentrl.store import EpisodeWriter, Recording, from_record
from agentrl.types import Trajectory


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = "go on from a turn of a recorded episode with a live engine: another observation, other seeds, other weights (--hf-checkpoint)"
    sub = add_command(commands, "fork", run_fork, about)
    sub.add_argument("episode", metavar="EPISODE", help="its id")
    sub.add_argument(
        "--turn", type=int, required=True, metavar="K", help="the first turn (from 0) that is sampled anew"
    )
    sub.add_argument(
        "--observation",
        metavar="TEXT",
        help="what the policy reads before turn K, in place of what it read (@FILE: from a file)",
    )
    sub.add_argument("--branches", type=int, default=4, metavar="N")
    sub.add_argument(
        "--branch-seed",
        type=int,
        default=0,
        metavar="S",
        help="branches draw by seeds S, S+1, …; 0 is the original's own (default 0)",
    )
    sub.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the branches are recorded (default: forks/ in the run folder)"
    )


def run_fork(args: argparse.Namespace, rest: list[str]) -> int:
    """`agentrl fork`."""
    if args.branches < 1:
        raise ConfigError(f"fork: --branches must be at least 1, found {args.branches}")
    recording = Recording(args.recorded)
    entry = recording.entry(args.episode)
    original = from_record(recording.record(entry), recording.images)
    components = Components(settings_of(args, rest), trains=False)
    seeds = range(args.branch_seed, args.branch_seed + args.branches)
    if entry.version:
        print(
            f"note: weights of version {entry.version} sampled it; the branches use {components.folder} (--hf-checkpoint says otherwise)"
        )
    branches = asyncio.run(_fork(components, original, entry.split, args.turn, observation_of(args.observation), seeds))
    out = args.out or next_folder(
        args.recorded if args.recorded.is_dir() else args.recorded.parent, original.episode_id, args.turn
    )
    write(out, branches, original, args)
    print(f"{table(original, branches)}\n\nrecorded in {out}")
    say_note(recording)
    return 0


async def _fork(
    components: Components, original: Trajectory, split: str, turn: int, observation: str | None, seeds: range
) -> list[Branch]:
    engine = components.engine()
    runner = runner_of(components, split, engine)
    try:
        await engine.start()
        return await fork(runner, original, turn, observation=observation, seeds=seeds)
    finally:
        runner.close()
        await engine.close()
        components.close()


def observation_of(given: str | None) -> str | None:
    """The text of `--observation`.

    Raises:
        ConfigError: its file cannot be read.
    """
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--observation {given}: cannot be read: {e}") from e


def next_folder(run: Path, episode_id: str, turn: int) -> Path:
    """`forks/EPISODE-tK-N`, the first N not taken."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", episode_id)
    number = 1
    while (run / "forks" / f"{stem}-t{turn}-{number}").exists():
        number += 1
    return run / "forks" / f"{stem}-t{turn}-{number}"


def write(out: Path, branches: list[Branch], original: Trajectory, args: argparse.Namespace) -> None:
    """Record the branches, each with where it comes from."""
    writer = EpisodeWriter(out)
    for b in branches:
        origin = {"episode_id": original.episode_id, "turn": args.turn, "seed": b.seed, "observation": args.observation}
        writer.write(b.trajectory, split="fork", fork=origin)
    writer.close()
