"""`agentrl rescore RUN --reward …`: what other rewards would have said of the same episodes."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import orjson

from agentrl.cli.common import add_command, say_note, settings_of
from agentrl.env import make_env_class
from agentrl.errors import ConfigError
from agentrl.replay.parallel_replay import groups_of
from agentrl.replay.rescore import Change, Rescored, rescore_group
from agentrl.reward import Scorer, resolve_rewards
from agentrl.store import EpisodeWriter, Recording, extra_fields, from_record

RESULT = "rescore.json"
"""in the run folder: what the last rescoring of it showed, for `agentrl view`"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = "score recorded episodes with other rewards (--reward, else the environment's of today) and compare"
    sub = add_command(commands, "rescore", run_rescore, about)
    sub.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the episodes with their new rewards into a new folder"
    )
    sub.add_argument("--split", default="train", help="which episodes: train, eval/NAME, or all (default train)")


def run_rescore(args: argparse.Namespace, rest: list[str]) -> int:
    """`agentrl rescore`."""
    recording = Recording(args.recorded)
    config = settings_of(args, rest)
    rewards = resolve_rewards(config.env.reward or make_env_class(config.env.env).rewards)
    if not rewards:
        raise ConfigError("rescore: the environment has no rewards of its own; name some with --reward")
    entries = [e for e in recording.episodes if args.split in ("all", e.split) or not e.split]
    if recording.episodes and not entries:
        splits = ", ".join(sorted({e.split for e in recording.episodes}))
        raise ConfigError(f"rescore: no episodes of --split {args.split}; there are: {splits} (or all)")
    if args.out is not None:
        _make_folder(args.out)
    change = Change(config.train.advantage_estimator, config.env.truncated_episodes)
    scorer = Scorer(rewards)
    writer = EpisodeWriter(args.out) if args.out is not None else None

    async def score_all() -> None:
        for group in groups_of(entries):
            records = list(recording.records(group))
            done = await rescore_group(scorer, [from_record(r, recording.images) for r in records])
            change.add([done])
            if writer is not None:
                _write(writer, records, done)

    try:
        asyncio.run(score_all())
    finally:
        scorer.close()
        if writer is not None:
            writer.close()
    print(change)
    own = (args.recorded / "config.toml").exists()
    if not say_note(recording, RESULT if own else "") and own:
        (args.recorded / RESULT).write_bytes(orjson.dumps({"rewards": [r.name for r in rewards], **change.to_json()}))
    return 0


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"rescore: {path} exists already; --out takes a new folder") from None
    except OSError as e:
        raise ConfigError(f"rescore: --out {path} cannot be made: {e.strerror}") from e


def _write(writer: EpisodeWriter, records: list[dict[str, Any]], done: Rescored) -> None:
    beside = {r["episode_id"]: extra_fields(r) for r in records}
    for t in done.today:
        writer.write(t, **beside[t.episode_id])
