"""`agentrl rescore`: score recorded episodes with other rewards."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import orjson

from agentrl.cli.common import Commands, print_note, print_now
from agentrl.cli.flags import read_given
from agentrl.core.atomic_write import new_file
from agentrl.core.name_syntax import split_envs
from agentrl.env import make_env_class
from agentrl.errors import ConfigError
from agentrl.replay.parallel_replay import groups_of
from agentrl.replay.rescore import Change, Rescored, rescore_group
from agentrl.reward import Scorer, resolve_rewards
from agentrl.run.resolve import resolve_recorded
from agentrl.store import EpisodeWriter, Recording, extra_fields, from_record

RESULT = "rescore.json"
"""Result of the last rescoring of a run, in its folder; `agentrl view` shows it."""


def add_parser(commands: Commands) -> None:
    about = "score recorded episodes with other rewards (--reward, or the environment's of today) and compare"
    parser = commands.add("rescore", run_rescore, about, words="RUN", recorded=True)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for the episodes with their new rewards")
    split = "episodes to score: train, eval/NAME, or all (default: %(default)s)"
    parser.add_argument("--split", default="train", metavar="NAME", help=split)


def run_rescore(args: argparse.Namespace, rest: list[str]) -> int:
    recording = Recording(args.recorded)
    config = resolve_recorded(read_given(args, rest), args.recorded)
    if len(split_envs(config.env.env or "")) > 1 and not config.env.reward:
        raise ConfigError(
            "the run has several environments, each with its rewards; give the rewards to score with by --reward"
        )
    rewards = resolve_rewards(config.env.reward or make_env_class(config.env.env).rewards)
    if not rewards:
        raise ConfigError("the environment has no rewards; give some with --reward")
    entries = [e for e in recording.episodes if args.split in ("all", e.split) or not e.split]
    if recording.episodes and not entries:
        splits = ", ".join(sorted({e.split for e in recording.episodes}))
        raise ConfigError(f"no episodes of --split {args.split}; the run has {splits} (or give all)")
    if args.out is not None:
        _make_folder(args.out)
    change = Change(config.train.advantage_estimator, config.env.truncated_episodes)
    scorer = Scorer(rewards)
    writer = EpisodeWriter(args.out) if args.out is not None else None

    async def score_all() -> None:
        for group in groups_of(entries):
            records = list(recording.records(group))
            rescored = await rescore_group(scorer, [from_record(r, recording.blobs) for r in records])
            change.add([rescored])
            if writer is not None:
                _write(writer, records, rescored)

    try:
        asyncio.run(score_all())
    finally:
        scorer.close()
        if writer is not None:
            writer.close()
    print_now(change)
    is_run = (args.recorded / "config.toml").exists()
    if not print_note(recording, RESULT if is_run else "") and is_run:
        with new_file(args.recorded / RESULT) as file:
            file.write_bytes(orjson.dumps({"rewards": [r.name for r in rewards], **change.to_json()}))
    return 0


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{path} already exists; --out takes a new folder") from None
    except OSError as e:
        raise ConfigError(f"--out {path} cannot be created: {e.strerror}") from e


def _write(writer: EpisodeWriter, records: list[dict[str, Any]], rescored: Rescored) -> None:
    extra = {r["episode_id"]: extra_fields(r) for r in records}
    for trajectory in rescored.today:
        writer.write(trajectory, **extra[trajectory.episode_id])
