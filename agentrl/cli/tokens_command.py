"""`agentrl tokens`: print a conversation as tokens, as a model's chat template renders it."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.common import Commands, print_now
from agentrl.errors import ConfigError


def add_parser(commands: Commands) -> None:
    about = (
        "print a conversation as tokens with provenance and loss mask, and what is proven about the chat template; "
        "run it first with a new model"
    )
    parser = commands.add("tokens", run_tokens, about, settings=False)
    model = "model folder, hub id, or name of an embedded model"
    parser.add_argument("--model", "--hf-checkpoint", required=True, metavar="PATH|NAME", help=model)
    conversation = "JSON of messages, or of {messages, tools} (default: an example)"
    parser.add_argument("--conversation", type=Path, metavar="PATH", help=conversation)
    action_format = "search_r1, hermes, … (default: the model family's)"
    parser.add_argument("--action-format", metavar="NAME", help=action_format)
    history = "if the template rewrites history: append to the sampled tokens, or render again (default: %(default)s)"
    parser.add_argument("--history-policy", choices=["append", "rerender"], default="append", help=history)
    parser.add_argument("--width", type=int, default=100, metavar="N", help="columns of text (default: %(default)s)")


def run_tokens(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.data.conversations import read_conversation
    from agentrl.render.token_report import EXAMPLE, token_report
    from agentrl.run.model_folder import model_folder

    if rest:
        raise ConfigError(f"unknown flag {rest[0]}")
    messages, tools = read_conversation(args.conversation) if args.conversation else (EXAMPLE, ())
    report = token_report(
        model_folder(args.model),
        messages,
        tools,
        action_format=args.action_format,
        history=args.history_policy,
        width=args.width,
    )
    print_now(report)
    return 0
