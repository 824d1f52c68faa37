"""`agentrl check`: check the contract of an environment."""

from __future__ import annotations

import argparse
import asyncio

from agentrl.cli.common import Commands, print_now
from agentrl.cli.foreign_flags import parse_value
from agentrl.env import check_env_args, make_env_class
from agentrl.errors import ConfigError, suggest
from agentrl.gateway.agent_env import AgentEnv


def add_parser(commands: Commands) -> None:
    about = "check the contract of an environment with a scripted and a random policy; needs no model"
    parser = commands.add("check", run_check, about, settings=False)
    parser.add_argument("--env", required=True, metavar="NAME|FILE.py", help="a name, module:Class or file.py[:Class]")
    parser.add_argument(
        "--env-arg", action="append", default=[], metavar="NAME=VALUE", help="constructor argument; repeatable"
    )
    parser.add_argument("--episodes", type=int, default=20, metavar="N", help="episodes to play (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the episodes (default: %(default)s)")


def run_check(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.check import check_env

    if rest:
        known = ("env", "env-arg", "episodes", "seed")
        raise ConfigError(f"unknown flag {rest[0]}{suggest(rest[0].lstrip('-').partition('=')[0], known)}")
    if args.episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, found {args.episodes}")
    env_class = make_env_class(args.env)
    pairs = [item.partition("=") for item in args.env_arg]
    env_args = {name: parse_value(value) for name, _, value in pairs}
    check_env_args(env_class, env_args)
    if issubclass(env_class, AgentEnv):
        raise ConfigError(
            f"{env_class.label()} is an AgentEnv, whose agent plays the turns; try it with `agentrl rollout --num-rollout 1`"
        )
    report = asyncio.run(check_env(env_class, env_args, episodes=args.episodes, seed=args.seed))
    print_now(report)
    return 0 if report.ok else 1
