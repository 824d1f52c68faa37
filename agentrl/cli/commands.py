"""The commands around recorded episodes and tokens, one small file each: `add_parser(commands)` and what it runs. cli.py hooks them in."""

from typing import Any


def add_commands(commands: Any) -> None:
    """Add all of them to the parser."""
    from agentrl.cli import convert_command as convert
    from agentrl.cli import export_command as export
    from agentrl.cli import fork_command as fork
    from agentrl.cli import replay_command as replay
    from agentrl.cli import rescore_command as rescore
    from agentrl.cli import tokens_command as tokens
    from agentrl.cli import view_command as view

    for command in (replay, rescore, fork, view, export, tokens, convert):
        command.add_parser(commands)
