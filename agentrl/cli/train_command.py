"""`agentrl train`: train a policy."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.common import Commands, print_now, run_job
from agentrl.cli.flags import read_flags
from agentrl.cli.resolve import resolve_played, resolve_trained
from agentrl.config import Config, build_config, read_toml
from agentrl.errors import ConfigError

_RESUMABLE = {"num_rollout", "save_interval", "eval_interval", "threads", "concurrency", "log_level"}
"""Settings that may change when a run continues."""


def add_parser(commands: Commands) -> None:
    parser = commands.add("train", run_train, "train a policy in an environment")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue a run from its last checkpoint, with its own settings"
    )
    parser.add_argument(
        "--train-only",
        type=Path,
        metavar="RUN",
        help="train on the recorded episodes of a run, with its settings, without an engine",
    )


def run_train(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.run.train_only import train_only
    from agentrl.run.training import train

    if args.resume:
        run_job(train(_resumed(args, rest), resume=args.resume, echo=print_now))
    elif args.train_only:
        run_job(train_only(resolve_trained(args, rest, [args.train_only]), args.train_only, echo=print_now))
    else:
        run_job(train(resolve_played(args, rest, scored=True), echo=print_now))
    return 0


def _resumed(args: argparse.Namespace, rest: list[str]) -> Config:
    """The run's own settings, with the few that may change."""
    from agentrl.store.checkpoints import require_run

    for flag in ("config", "train_only"):
        if getattr(args, flag):
            raise ConfigError(
                f"--resume continues with the run's own settings and episodes; leave out --{flag.replace('_', '-')}"
            )
    flags = read_flags(args, rest)
    config = build_config(flags, base=read_toml(require_run(args.resume) / "config.toml"))
    if changed := sorted(flags.keys() - _RESUMABLE):
        raise ConfigError(
            f"--resume continues with the run's own settings; leave out --{changed[0].replace('_', '-')}, "
            "or start a new run"
        )
    return config
