"""`agentrl gateway`: record agents that somebody else starts."""

from __future__ import annotations

import argparse

from agentrl.cli.common import Commands, print_now, run_job
from agentrl.cli.flags import read_given
from agentrl.run.resolve import resolve_open_gateway


def add_parser(commands: Commands) -> None:
    about = "serve the policy to agents that you start yourself, and record their episodes for replay, SFT and the page"
    commands.add("gateway", run_gateway, about)


def run_gateway(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.run.gateway import serve_gateway

    run_job(serve_gateway(resolve_open_gateway(read_given(args, rest)), echo=print_now))
    return 0
