"""What the commands share: adding them to the parser, running a job, and recorded episodes."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agentrl.cli.flags import add_flags
from agentrl.config import Config
from agentrl.core.terminal_text import print_now as print_now
from agentrl.errors import ConfigError
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.mixed_runner import MixedRunner
from agentrl.run.components import Components
from agentrl.store import IndexEntry, Recording

RunCommand = Callable[[argparse.Namespace, list[str]], int]
"""Runs a command with its arguments and the words that argparse did not know; returns the exit status."""

HelpFormatter = functools.partial(argparse.HelpFormatter, max_help_position=32, width=100)

_MORE_HELP = (
    "`agentrl %s --help-all` lists all flags, `agentrl help FLAG` explains one. Megatron's flags keep their names, "
    "SGLang's are --sglang-NAME. A flag is also a key of its [section] in the file of --config."
)


class Commands:
    """The commands of the parser. `shown` are the settings that get flags: all of them, or a few for `--help`."""

    def __init__(self, parser: argparse.ArgumentParser, shown: Collection[str]) -> None:
        self._commands = parser.add_subparsers(dest="command", metavar="COMMAND")
        self._shown = shown

    @property
    def parsers(self) -> dict[str, argparse.ArgumentParser]:
        """The parser of each command."""
        return dict(self._commands.choices)

    def add(
        self,
        name: str,
        run: RunCommand,
        about: str,
        *,
        words: str = "",
        settings: bool = True,
        recorded: bool = False,
    ) -> argparse.ArgumentParser:
        """Add a command. `words` are its positional arguments in the usage.

        With `settings`, every setting is a flag. With `recorded`, the first argument is recorded episodes.
        """
        usage = " ".join(filter(None, [f"agentrl {name}", words, "[--config FILE.toml] [--FLAG VALUE ...]"]))
        parser: argparse.ArgumentParser = self._commands.add_parser(
            name,
            help=about,
            description=about,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
            usage=usage if settings else None,
            epilog=_MORE_HELP % name if settings else None,
        )
        parser.set_defaults(run_command=run)
        if recorded:
            text = "run folder, folder of episodes, or file of episodes"
            parser.add_argument("recorded", type=Path, metavar="RUN", help=text)
        if settings:
            parser.add_argument("--help-all", action="help", help="list all flags by section and exit")
            source = "settings, instead of the run's config.toml" if recorded else "settings"
            parser.add_argument("--config", type=Path, metavar="FILE.toml", help=f"{source}; flags override them")
            add_flags(parser, self._shown, several_envs=not (recorded or words))
        return parser


def require_no_more(rest: Sequence[str]) -> None:
    """Refuse words that argparse did not know.

    Raises:
        ConfigError: There is one.
    """
    if rest:
        raise ConfigError(f"unexpected {rest[0]!r}")


def joins(config: Config, run: Path | None = None) -> bool:
    """Whether this node only has trainer ranks of a run on several nodes. They ran then, until node 0 ended the run in the folder `run`.

    Raises:
        AgentRLError: node 0 did not start, or is gone.
    """
    from agentrl.run.machines import join_run, node_rank

    if node_rank(config) == 0:
        return False
    join_run(config, run or (Path(config.run.run) if config.run.run else None), print_now)
    return True


STOP_TIMEOUT_S = 120.0
"""How long closing may take after the first SIGINT or SIGTERM."""
LEFTOVER_TIMEOUT_S = 10.0
"""How long tasks that a finished job left behind may take to end."""


def run_job(job: Coroutine[Any, Any, Any]) -> None:
    """Run a job to its end.

    The first SIGINT or SIGTERM stops it: it closes everything and reports how the run continues. The second ends the process at once, as does
    a job that is not closed after `STOP_TIMEOUT_S`, for example because a coroutine of the user swallows its cancellation. Child processes
    end with this one. A signal that is ignored stays ignored, as SIGINT is in a script's background jobs.

    Raises:
        KeyboardInterrupt: The job was stopped.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(job)
    late = f"stopped without closing, which took more than {STOP_TIMEOUT_S:g} s; a tool or environment may ignore its cancellation"
    deadline = threading.Timer(STOP_TIMEOUT_S, _end_now, [late])
    deadline.daemon = True
    signals: list[int] = []

    def stop(number: int, frame: object) -> None:
        signals.append(number)  # first of all: the next signal may arrive within this handler
        if len(signals) > 1:
            _end_now("stopped at the second signal, without closing")
        deadline.start()
        loop.call_soon_threadsafe(task.cancel)

    handled = []
    if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
        handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        if not signals:
            raise
        raise KeyboardInterrupt from None
    finally:
        _cancel_leftovers(loop)
        deadline.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
        loop.close()


def _cancel_leftovers(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that a job left behind, and wait for them, but not without end."""
    leftovers = asyncio.all_tasks(loop)
    for task in leftovers:
        task.cancel()
    if leftovers:
        loop.run_until_complete(asyncio.wait(leftovers, timeout=LEFTOVER_TIMEOUT_S))
    loop.run_until_complete(loop.shutdown_asyncgens())


def _end_now(reason: str) -> NoReturn:
    """End the process without waiting for anything; what was recorded is on disk."""
    os.write(2, f"agentrl: {reason}\n".encode())
    os._exit(130)


def runner_of(components: Components, split: str, engine: Any = None) -> EpisodeRunner | MixedRunner:
    """A runner with the seed and the temperature of a split: 'train' or 'eval/NAME'."""
    for name, function in (
        ("custom-generate-function-path", components.generate_function),
        ("rollout-function-path", components.rollout_function),
    ):
        if function is not None:
            raise ConfigError(f"episodes of --{name} cannot be played again; `agentrl view` and `rescore` read them")
    return components.runner(engine, components.runner_settings(split))


def chosen_entries(recording: Recording, ids: Sequence[str]) -> list[IndexEntry]:
    """The entries of these episodes, or of all if no id is given."""
    return [recording.entry(i) for i in ids] if ids else recording.episodes


def print_note(recording: Recording, unwritten: str = "") -> bool:
    """Print that a run is still being written, or that incomplete records were skipped. Return whether it is being written.

    The folder of a run that is being written is not changed; `unwritten` names the file that would have been written there.
    """
    if recording.note:
        left_alone = f"; {unwritten} is not changed" if recording.being_written and unwritten else ""
        print_now(f"{recording.note}{left_alone}")
    return recording.being_written
