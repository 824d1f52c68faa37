"""`agentrl convert`: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentrl.cli.common import no_more
from agentrl.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = "write a GGUF file's model and tokenizer as a Hugging Face folder in float32"
    parser = commands.add_parser("convert", help=about, description=about, allow_abbrev=False)
    parser.add_argument("gguf", type=Path, help="the file")
    parser.add_argument("folder", type=Path, help="made anew")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Convert."""
    from agentrl.train.megatron.gguf import convert_gguf

    no_more("convert", rest)
    if args.folder.exists():
        raise ConfigError(f"{args.folder} exists already; name a new folder")
    print(convert_gguf(args.gguf, args.folder))
    return 0
