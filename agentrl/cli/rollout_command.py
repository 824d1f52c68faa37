"""`agentrl rollout`: run and record episodes."""

from __future__ import annotations

import argparse

from agentrl.cli.common import Commands, print_now, run_job
from agentrl.cli.flags import read_given
from agentrl.run.resolve import resolve_played


def add_parser(commands: Commands) -> None:
    about = "run and record episodes without training: --num-rollout times --rollout-batch-size tasks"
    commands.add("rollout", run_rollout, about)


def run_rollout(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.run.rollouts import rollout_only

    run_job(rollout_only(resolve_played(read_given(args, rest), scored=False), echo=print_now))
    return 0
