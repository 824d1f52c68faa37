"""`agentrl eval`: evaluate a policy."""

from __future__ import annotations

import argparse

from agentrl.cli.common import Commands, print_now, run_job
from agentrl.cli.flags import read_given
from agentrl.run.resolve import resolve_played


def add_parser(commands: Commands) -> None:
    commands.add("eval", run_eval, "evaluate a policy on the held-out tasks")


def run_eval(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.run.evaluation import evaluate_only

    run_job(evaluate_only(resolve_played(read_given(args, rest), scored=True, evaluates=True), echo=print_now))
    return 0
