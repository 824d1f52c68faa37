"""`agentrl check`: check the contract of an environment."""

from __future__ import annotations

import argparse
import asyncio

from agentrl.cli.common import Commands, print_now
from agentrl.cli.flags import metavar, summary
from agentrl.cli.foreign_flags import parse_value
from agentrl.config.describe import flag_names, setting
from agentrl.config.settings import DataSettings
from agentrl.data.data_files import load_tasks
from agentrl.env import Env, check_env_args, make_env_class
from agentrl.errors import ConfigError, suggest
from agentrl.gateway.agent_env import AgentEnv
from agentrl.types import Task

_DATA = ("prompt_data", "input_key", "label_key", "metadata_key", "tool_key")
"""The settings of data that the check takes."""


def add_parser(commands: Commands) -> None:
    about = "check the contract of an environment with a scripted and a random policy; needs no model"
    parser = commands.add("check", run_check, about, settings=False)
    parser.add_argument("--env", required=True, metavar="NAME|FILE.py", help="a name, module:Class or file.py[:Class]")
    parser.add_argument(
        "--env-arg", action="append", default=[], metavar="NAME=VALUE", help="constructor argument; repeatable"
    )
    for name in _DATA:
        parser.add_argument(
            *flag_names(name), metavar=metavar(setting(name)), help=summary(setting(name)).replace("%", "%%")
        )
    parser.add_argument("--episodes", type=int, default=20, metavar="N", help="episodes to play (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the episodes (default: %(default)s)")


def run_check(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.check import check_env

    if rest:
        known = ("env", "env-arg", *(name.replace("_", "-") for name in _DATA), "episodes", "seed")
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
    tasks = _tasks(args, env_class)
    report = asyncio.run(check_env(env_class, env_args, tasks=tasks, episodes=args.episodes, seed=args.seed))
    print_now(report)
    return 0 if report.ok else 1


def _tasks(args: argparse.Namespace, env_class: type[Env]) -> list[Task] | None:
    """The tasks of --prompt-data, read and refused as for training; None: the environment's own."""
    if args.prompt_data is None:
        if keys := [name for name in _DATA[1:] if getattr(args, name) is not None]:
            flag = f"--{keys[0].replace('_', '-')}"
            raise ConfigError(
                f"{flag} names a column of --prompt-data, which is not given; give it, or leave {flag} out"
            )
        return None
    return load_tasks(
        args.prompt_data,
        input_key=args.input_key or env_class.input_key,
        label_key=args.label_key or env_class.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key or DataSettings.tool_key,
        label_required=args.label_key is not None,
        check=env_class.check_task,
    )
