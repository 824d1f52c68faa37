"""`agentrl tokens`: how a model's template renders a conversation, token by token, and what is proven of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = "print a conversation as tokens with provenance and mask, and what is proven of each delta; run it first with a new model"
    parser = commands.add_parser("tokens", help=about, description=about, allow_abbrev=False)
    parser.add_argument(
        "--model",
        "--hf-checkpoint",
        required=True,
        metavar="DIR",
        help="a model folder, a hub id or an embedded model's name",
    )
    parser.add_argument(
        "--conversation", type=Path, metavar="FILE", help="JSON: messages, or {messages, tools}; default: an example"
    )
    parser.add_argument("--action-format", metavar="NAME", help="search_r1, hermes, …; default: the model family's own")
    parser.add_argument("--history-policy", choices=["append", "rerender"], default="append")
    parser.add_argument("--width", type=int, default=100, help="of the printed text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the report."""
    from agentrl.render.token_report import show_tokens
    from agentrl.run.model_folder import model_folder

    if rest:
        raise ConfigError(f"tokens: unknown flag {rest[0]}")
    folder = model_folder(args.model)
    print(
        show_tokens(
            folder, args.conversation, action_format=args.action_format, history=args.history_policy, width=args.width
        )
    )
    return 0
