"""The command line. Bad input is one sentence and exit status 2; other failures are exit status 1."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from agentrl import __version__
from agentrl.cli.common import Commands, HelpFormatter, print_now
from agentrl.cli.flags import BASIC, complete_switches
from agentrl.cli.foreign_flags import own_names, split_unknown
from agentrl.config import FIELDS
from agentrl.core.machine_errors import machine_sentence
from agentrl.core.redaction import remember_environment
from agentrl.core.terminal_text import with_short_words
from agentrl.errors import AgentRLError, ConfigError, StoreError, UsageError, suggest
from agentrl.run.run_log import warnings_on_stderr

_COMMANDS = "train rollout eval sft gateway check replay rescore fork view export tokens convert help".split()
"""Command NAME is the module NAME_command, which adds it to the parser."""


class Parser(argparse.ArgumentParser):
    """Reports errors as ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError."""
        missing = re.sub(r"argument (.*): expected (.*) argument", r"\1 takes \2 value, found none", message)
        raise ConfigError(missing)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    remember_environment(os.environ)
    parser, commands = make_parser(basic="-h" in words or "--help" in words)
    command = words[0] if words and not words[0].startswith("-") else None
    name = f"agentrl {command}" if command in commands else "agentrl"
    try:
        if command is not None and command not in commands:
            raise ConfigError(f"unknown command {command!r}{suggest(command, commands)}")
        if command is not None and commands[command].get_default("takes_settings"):
            words = complete_switches(own_names(words))
        args, rest = parser.parse_known_args(words)
        if command == "sft" and rest:
            words, foreign = split_unknown(words, rest)
            args, rest = parser.parse_known_args(words)
            rest = foreign + rest
        if args.command is None:
            parser.print_help()
            return 2
        args.words = words
        with warnings_on_stderr():
            status: int = _ungrouped(args.run_command, args, rest)
    except (UsageError, StoreError) as e:
        print_now(f"{name}: {with_short_words(e)}", sys.stderr)
        return 2
    except AgentRLError as e:
        print_now(f"{name}: {type(e).__name__}: {with_short_words(e)}", sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print_now(f"{name}: interrupted", sys.stderr)
        return 130
    except Exception as e:
        if isinstance(e, OSError) and e.errno == errno.ENAMETOOLONG:
            print_now(
                f"{name}: {e.strerror}: {e.filename!a:.60}; give a path that the file system can hold", sys.stderr
            )
            return 2
        if (sentence := machine_sentence(e)) is None:
            raise
        print_now(f"{name}: {sentence}; what was written before is complete", sys.stderr)
        return 1
    return status


def _ungrouped(run: Callable[..., int], *args: Any) -> int:
    """Call it; a group of exceptions is raised as its first one: errors of several tasks, such as a full disk, have one cause."""
    try:
        return run(*args)
    except ExceptionGroup as e:
        error: Exception = e
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def make_parser(*, basic: bool = False) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and the parser of each command. With `basic`, only the basic settings have flags, as `--help` shows them."""
    parser = Parser(
        prog="agentrl",
        description="Reinforcement learning of language-model agents.",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    commands = Commands(parser, BASIC if basic else FIELDS)
    for name in _COMMANDS:
        importlib.import_module(f"agentrl.cli.{name}_command").add_parser(commands)
    return parser, commands.parsers
