"""`agentrl sft`: supervised training."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.common import Commands, joins, print_now, run_job
from agentrl.cli.flags import read_given
from agentrl.run.resolve import resolve_trained


def add_parser(commands: Commands) -> None:
    about = "train on recorded episodes or on conversations, with the loss masks of RL training"
    parser = commands.add("sft", run_sft, about, words="EPISODES [EPISODES ...]")
    kinds = (
        "folders of recorded episodes, or data sets of conversations: files, folders, patterns, hub ids (key messages)"
    )
    parser.add_argument("episodes", type=Path, nargs="+", metavar="EPISODES", help=kinds)


def run_sft(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.run.sft import sft

    config = resolve_trained(read_given(args, rest), args.episodes)
    if not joins(config):
        run_job(sft(config, args.episodes, echo=print_now))
    return 0
