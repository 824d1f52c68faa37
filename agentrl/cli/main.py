"""The command line. Bad input is one clear sentence and exit status 2; everything else that fails is status 1."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from agentrl import __version__
from agentrl.cli.commands import add_commands
from agentrl.cli.flags import add_flags, read_flags, split_unknown, with_truth
from agentrl.config import Config, Layer, build_config, read_toml
from agentrl.config.paths import anchor
from agentrl.engine.sglang.installation import gpus
from agentrl.env import make_env_class
from agentrl.errors import AgentRLError, ConfigError, StoreError, UsageError, suggest
from agentrl.run.model_folder import embedded

Words = list[str]


class Parser(argparse.ArgumentParser):
    """Says what is wrong as everything else here does."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError."""
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser, commands = make_parser()
    command = words[0] if words and not words[0].startswith("-") else None
    name = "agentrl" if command is None or command not in commands else f"agentrl {command}"
    try:
        if command is not None and command not in commands:
            raise ConfigError(f"unknown command {command!r}{suggest(command, commands)}")
        if command is not None and commands[command].get_default("takes_settings"):
            words = with_truth(words)
        args, rest = parser.parse_known_args(words)
        if command == "sft" and rest:
            words, rest = split_unknown(words, rest)
            args, more = parser.parse_known_args(words)
            rest += more
        if args.command is None:
            parser.print_help()
            return 2
        result: int = args.run_command(args, rest)
    except (UsageError, StoreError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 2
    except AgentRLError as e:
        print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return result


def make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """All commands and flags, and the commands' own parsers by name."""
    parser = Parser(prog="agentrl", description="Reinforcement learning for language-model agents.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace, Words], int], about: str, *, settings: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        sub.set_defaults(run_command=run)
        if settings:
            sub.add_argument("--config", type=Path, metavar="FILE.toml", help="settings; flags win over them")
            add_flags(sub)
        return sub

    train = add("train", run_train, "train a policy in an environment")
    train.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with a run folder from its last checkpoint, with its own settings",
    )
    only = "train on recorded episodes (a run folder or a folder of episodes), without an engine"
    train.add_argument("--train-only", type=Path, metavar="EPISODES", help=only)
    add(
        "rollout",
        run_rollout,
        "run and record episodes without training (--num-rollout times --rollout-batch-size tasks)",
    )
    add("eval", run_eval, "evaluate a policy on the held-out tasks")
    sft = add("sft", run_sft, "train on recorded episodes or on conversations, with the same masks")
    sft.add_argument(
        "episodes",
        type=Path,
        nargs="+",
        help="folders of recorded episodes, or JSONL files of conversations (key messages)",
    )
    check = add(
        "check",
        run_check,
        "check an environment's contract with a scripted and a random policy; no model needed",
        settings=False,
    )
    check.add_argument("--env", required=True, help="name, module:Class or file.py")
    check.add_argument("--env-arg", action="append", default=[], metavar="NAME=VALUE")
    check.add_argument("--episodes", type=int, default=20)
    check.add_argument("--seed", type=int, default=0)
    add_commands(commands)
    return parser, commands.choices


def resolve(args: argparse.Namespace, rest: Words) -> Config:
    """Layers: defaults, the environment's own TOML, --config, flags."""
    flags = read_flags(args, rest)
    file: Layer = read_toml(args.config) if args.config else {}
    env = str(flags.get("env", file.get("env", Config().env.env)))
    config = anchor(build_config(env_defaults(env), file, flags), embedded=embedded())
    if config.run.date:
        return config
    return replace(config, run=replace(config.run, date=datetime.date.today().isoformat()))


def env_defaults(env: str) -> Layer:
    """Recommended settings that lie beside an environment's file: `NAME.toml` next to `NAME.py`. No more trainer ranks than this machine has
    GPUs, if it has any.
    """
    source = sys.modules[make_env_class(env).__module__].__file__
    beside = Path(source).with_suffix(".toml") if source else None
    if not beside or not beside.exists():
        return {}
    layer = read_toml(beside)
    ranks = layer.get("actor_num_gpus_per_node", 1)
    if isinstance(ranks, int) and ranks > 1 and (cards := len(gpus())):
        layer["actor_num_gpus_per_node"] = min(ranks, cards)
    return layer


def run_train(args: argparse.Namespace, rest: Words) -> int:
    """`agentrl train`."""
    from agentrl.run.training import train

    if args.resume:
        from agentrl.store.run_folder import require_run

        for flag in ("config", "train_only"):
            if getattr(args, flag):
                raise ConfigError(
                    f"--resume goes on with the run's own settings and episodes; leave out --{flag.replace('_', '-')}"
                )
        given = read_flags(args, rest)
        config = build_config(read_toml(require_run(args.resume) / "config.toml"), given)
        changed = sorted(
            set(given) - {"num_rollout", "save_interval", "eval_interval", "threads", "concurrency", "log_level"}
        )
        if changed:
            raise ConfigError(
                f"--resume goes on with the run's own settings; leave out --{changed[0].replace('_', '-')}, or begin a new run"
            )
        run_job(train(config, resume=args.resume, out=say))
        return 0
    if args.train_only:
        from agentrl.run.jobs import train_only

        run_job(train_only(resolve(args, rest), args.train_only, out=say))
        return 0
    run_job(train(resolve(args, rest), out=say))
    return 0


def run_rollout(args: argparse.Namespace, rest: Words) -> int:
    """`agentrl rollout`."""
    from agentrl.run.jobs import rollout_only

    run_job(rollout_only(resolve(args, rest), out=say))
    return 0


def run_eval(args: argparse.Namespace, rest: Words) -> int:
    """`agentrl eval`."""
    from agentrl.run.jobs import evaluate_only

    run_job(evaluate_only(resolve(args, rest), out=say))
    return 0


def run_sft(args: argparse.Namespace, rest: Words) -> int:
    """`agentrl sft`."""
    from agentrl.run.sft import sft

    run_job(sft(resolve(args, rest), args.episodes, out=say))
    return 0


def run_check(args: argparse.Namespace, rest: Words) -> int:
    """`agentrl check`."""
    from agentrl.check import check_env
    from agentrl.cli.flags import parse_value
    from agentrl.env import check_env_args

    if rest:
        known = ("env", "env-arg", "episodes", "seed")
        raise ConfigError(f"unknown flag {rest[0]}{suggest(rest[0].lstrip('-').partition('=')[0], known)}")
    if args.episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, found {args.episodes}")
    env_class = make_env_class(args.env)
    pairs = [item.partition("=") for item in args.env_arg]
    env_args = {k: parse_value(v) for k, _, v in pairs}
    check_env_args(env_class, env_args)
    report = asyncio.run(check_env(env_class, env_args, episodes=args.episodes, seed=args.seed))
    print(report)
    return 0 if report.ok else 1


def run_job(work: Coroutine[Any, Any, Any]) -> None:
    """Run it to its end. SIGTERM stops it as Ctrl-C does: everything is closed, and the run says how it goes on.

    Raises:
        KeyboardInterrupt: it was stopped.
    """
    stopped = False

    async def until_stopped() -> None:
        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        task = asyncio.ensure_future(work)
        if threading.current_thread() is threading.main_thread():  # signals are its own
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await task

    try:
        asyncio.run(until_stopped())
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise KeyboardInterrupt from None


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)
