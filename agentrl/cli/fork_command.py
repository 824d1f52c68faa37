"""`agentrl fork`: continue a recorded episode from one of its turns."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from agentrl.cli.common import Commands, print_note, print_now, runner_of
from agentrl.cli.flags import read_given
from agentrl.errors import ConfigError
from agentrl.replay.fork import Branch, fork, table
from agentrl.run.components import Components
from agentrl.run.recorded_ids import RecordedIds
from agentrl.run.resolve import resolve_recorded
from agentrl.store import EpisodeWriter, Recording, from_record
from agentrl.types import Trajectory


def add_parser(commands: Commands) -> None:
    about = (
        "continue a recorded episode from one of its turns with a live engine: with another observation, other seeds, "
        "or other weights (--hf-checkpoint)"
    )
    parser = commands.add("fork", run_fork, about, words="RUN EPISODE --turn K", recorded=True)
    parser.add_argument("episode", metavar="EPISODE", help="id of the episode")
    parser.add_argument("--turn", type=int, required=True, metavar="K", help="first turn to sample again, from 0")
    text = "what the policy reads before turn K, instead of what it read; @FILE reads it from a file"
    parser.add_argument("--observation", metavar="TEXT", help=text)
    parser.add_argument(
        "--branches", type=int, default=4, metavar="N", help="branches to sample (default: %(default)s)"
    )
    seeds = "branches are seeded S, S+1, …; 0 is the seed of the original (default: %(default)s)"
    parser.add_argument("--branch-seed", type=int, default=0, metavar="S", help=seeds)
    out = "where to record the branches (default: forks/ in the run folder)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=out)


def run_fork(args: argparse.Namespace, rest: list[str]) -> int:
    if args.branches < 1:
        raise ConfigError(f"--branches must be at least 1, found {args.branches}")
    if args.out is not None:
        _require_folder(args.out)
    recording = Recording(args.recorded)
    entry = recording.entry(args.episode)
    original = from_record(recording.record(entry), recording.blobs)
    components = Components(resolve_recorded(read_given(args, rest), args.recorded), trains=False)
    RecordedIds(components, args.recorded).check(original)
    seeds = range(args.branch_seed, args.branch_seed + args.branches)
    if entry.version:
        print_now(
            f"note: the episode was sampled with weights of version {entry.version}; "
            f"the branches use {components.folder} (give --hf-checkpoint for others)"
        )
    branches = asyncio.run(_fork(components, original, entry.split, args.turn, observation_of(args.observation), seeds))
    out = args.out or next_folder(
        args.recorded if args.recorded.is_dir() else args.recorded.parent, original.episode_id, args.turn
    )
    write(out, branches, original, args)
    print_now(f"{table(original, branches)}\n\nrecorded in {out}")
    print_note(recording)
    return 0


def _require_folder(out: Path) -> None:
    """Refuse --out before anything is sampled if no folder can be there.

    Raises:
        ConfigError: it, or a part of its path, is a file.
    """
    nearest = next(path for path in (out, *out.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {out}: {nearest} is a file; give a folder")


async def _fork(
    components: Components, original: Trajectory, split: str, turn: int, observation: str | None, seeds: range
) -> list[Branch]:
    engine = components.engine()
    runner = runner_of(components, split, engine)
    try:
        await engine.start()
        return await fork(runner.for_env(original.env), original, turn, observation=observation, seeds=seeds)
    finally:
        runner.close()
        await components.close_agents()
        await engine.close()
        components.close()


def observation_of(given: str | None) -> str | None:
    """The text of `--observation`, from its file if it begins with @.

    Raises:
        ConfigError: The file cannot be read.
    """
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--observation {given}: cannot be read: {e}") from e


def next_folder(run: Path, episode_id: str, turn: int) -> Path:
    """The first free `forks/EPISODE-tK-N` in the run folder."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", episode_id)
    number = 1
    while (run / "forks" / f"{stem}-t{turn}-{number}").exists():
        number += 1
    return run / "forks" / f"{stem}-t{turn}-{number}"


def write(out: Path, branches: list[Branch], original: Trajectory, args: argparse.Namespace) -> None:
    """Record the branches, each with its origin."""
    writer = EpisodeWriter(out)
    for b in branches:
        origin = {"episode_id": original.episode_id, "turn": args.turn, "seed": b.seed, "observation": args.observation}
        writer.write(b.trajectory, split="fork", fork=origin)
    writer.close()
