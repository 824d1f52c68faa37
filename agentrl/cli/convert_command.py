"""`agentrl convert`: convert a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.common import Commands, print_now, require_no_more
from agentrl.errors import ConfigError


def add_parser(commands: Commands) -> None:
    about = "convert the model and tokenizer of a GGUF file to a Hugging Face folder in float32"
    parser = commands.add("convert", run_convert, about, settings=False)
    parser.add_argument("gguf", type=Path, metavar="FILE.gguf", help="the file to convert")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to create")


def run_convert(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.train.megatron.gguf import convert_gguf

    require_no_more(rest)
    if args.folder.exists():
        raise ConfigError(f"{args.folder} already exists; choose a new folder")
    print_now(convert_gguf(args.gguf, args.folder))
    return 0
