"""The commands around recorded episodes, one small file each: `add_parser(commands)` and what it runs. cli.py hooks them in."""

from typing import Any


def add_commands(commands: Any) -> None:
    """Add all of them to the parser."""
    from agentrl.commands import fork, replay, rescore

    for command in (replay, rescore, fork):
        command.add_parser(commands)
