"""`agentrl train`: train a policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from agentrl.cli.common import Commands, joins, print_now, run_job
from agentrl.cli.flags import read_given
from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.run.machines import flags_of_node
from agentrl.run.resolve import resolve_played, resolve_resumed, resolve_trained
from agentrl.run.supervisor import Supervised, supervise


def add_parser(commands: Commands) -> None:
    parser = commands.add("train", run_train, "train a policy in an environment")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue a run from its last checkpoint, with its own settings"
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="RUN",
        help="resume the run in this folder, or start a new run there if the folder does not exist",
    )
    parser.add_argument(
        "--train-only",
        type=Path,
        metavar="RUN",
        help="train on the recorded episodes of a run, with its settings, without an engine",
    )
    parser.add_argument(
        "--debug-train-only", action="store_true", help="train on recorded episodes only; needs --train-only RUN"
    )
    parser.add_argument(
        "--debug-rollout-only", action="store_true", help="play episodes without training, as `agentrl rollout`"
    )


def run_train(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.run.rollouts import rollout_only
    from agentrl.run.train_only import train_only
    from agentrl.run.training import train

    if args.debug_train_only and not args.train_only:
        raise ConfigError("--debug-train-only trains on recorded episodes; give --load-debug-rollout-data RUN")
    _require_one(args)
    if args.train_only:
        config = resolve_trained(read_given(args, rest), [args.train_only])
        if not joins(config):
            run_job(train_only(config, args.train_only, echo=print_now))
        return 0
    if args.debug_rollout_only:
        run_job(rollout_only(resolve_played(read_given(args, rest), scored=False), echo=print_now))
        return 0
    supervised = Supervised.of_environment()
    with supervised.reporting_final_errors() if supervised else nullcontext():
        run = args.resume or _loaded(args)
        given = read_given(args, rest)
        how = "--resume" if args.resume else "--load"
        config = resolve_resumed(given, run, how=how) if run else resolve_played(given, scored=True)
        if joins(config, run):
            return 0
        if config.run.use_fault_tolerance and supervised is None:
            return _supervise(args.words, config)
        on_folder = supervised.report_folder if supervised else None
        run_job(train(config, resume=run, echo=print_now, on_folder=on_folder))
    return 0


def _supervise(words: Sequence[str], config: Config) -> int:
    """Run this command in a child process, and continue its run after a crash."""
    agentrl = [sys.executable, "-m", "agentrl.cli"]

    def resume(folder: Path) -> list[str]:
        node = flags_of_node(config.train)
        return [*agentrl, "train", "--resume", str(folder), "--log-level", config.run.log_level, *node]

    return supervise([*agentrl, *words], resume, lambda line: print_now(f"agentrl train: {line}", sys.stderr))


def _require_one(args: argparse.Namespace) -> None:
    """Refuse flags that name different sources of episodes.

    Raises:
        ConfigError: there are two.
    """
    if args.resume:
        for flag in ("config", "load", "train_only", "debug_rollout_only"):
            if getattr(args, flag):
                raise ConfigError(
                    f"--resume continues with the run's own settings and episodes; leave out --{flag.replace('_', '-')}"
                )
    given = [
        f"--{name.replace('_', '-')}" for name in ("load", "train_only", "debug_rollout_only") if getattr(args, name)
    ]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; give one of them")


def _loaded(args: argparse.Namespace) -> Path | None:
    """The run folder of --load, if it is there; otherwise the new run gets this folder.

    Raises:
        ConfigError: --run names another folder, or the folder does not hold a run.
    """
    if args.load is None:
        return None
    folder: Path = args.load
    saved = getattr(args, "run", None)
    if saved is not None and Path(saved).absolute() != folder.absolute():
        raise ConfigError(
            f"a run continues in its own folder, but --load is {folder} and --save (--run) is {saved}; give both the same folder, "
            "or start a new run from its weights with --hf-checkpoint RUN/hf"
        )
    if not folder.exists():
        args.run = str(folder)
        return None
    if not (folder / "config.toml").exists():
        raise ConfigError(
            f"--load {folder} does not hold a run of agentrl; to start from the weights of a model give --hf-checkpoint DIR"
        )
    return folder
