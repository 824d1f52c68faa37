"""The commands around recorded episodes and tokens, one small file each: `add_parser(commands)` and what it runs. cli.py hooks them in."""

from typing import Any


def add_commands(commands: Any) -> None:
    """Add all of them to the parser."""
    from agentrl.commands import convert, export, fork, replay, rescore, tokens, view

    for command in (replay, rescore, fork, view, export, tokens, convert):
        command.add_parser(commands)
