"""`agentrl convert`: convert models between GGUF files, Hugging Face folders and the trainer's checkpoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from agentrl.cli.common import Commands, print_now, require_no_more
from agentrl.config import build_config, read_toml
from agentrl.errors import ConfigError
from agentrl.run.model_folder import model_folder
from agentrl.store.run_folder import recorded_config


def add_parser(commands: Commands) -> None:
    about = (
        "convert a checkpoint or a GGUF file to a Hugging Face folder, or a Hugging Face folder to a checkpoint of the trainer; "
        "what SOURCE is decides"
    )
    parser = commands.add("convert", run_convert, about, settings=False)
    source = "a file FILE.gguf, a Hugging Face folder, or a checkpoint (RUN/checkpoints/NNNNNN)"
    parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to create")
    model = "the model that a checkpoint was trained from, whose config.json and tokenizer are copied (default: that of its run)"
    parser.add_argument("--model", metavar="PATH|NAME", help=model)
    dtype = "dtype of the weights (default: that of the run, else of config.json; a GGUF file: float32)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=dtype)


def run_convert(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.train.megatron.convert import checkpoint_in, write_checkpoint, write_hugging_face
    from agentrl.train.megatron.gguf import convert_gguf

    require_no_more(rest)
    if args.folder.exists():
        raise ConfigError(f"{args.folder} already exists; choose a new folder")
    if args.source.suffix == ".gguf":
        if args.model or args.dtype:
            raise ConfigError("a GGUF file takes neither --model nor --dtype")
        print_now(convert_gguf(args.source, args.folder))
    elif checkpoint := checkpoint_in(args.source):
        model, dtype = _recorded(args.source)
        folder = model_folder(args.model or model)
        write_hugging_face(checkpoint, folder, args.folder, args.dtype or dtype or _dtype_of(folder))
        print_now(args.folder)
    elif (args.source / "config.json").is_file():
        if args.model:
            raise ConfigError(f"--model belongs to a checkpoint, but {args.source} is a Hugging Face folder")
        write_checkpoint(args.source, args.folder, args.dtype or _dtype_of(args.source))
        print_now(args.folder)
    else:
        raise ConfigError(
            f"{args.source} is neither a GGUF file, nor a Hugging Face folder (with config.json), nor a checkpoint of the trainer"
        )
    return 0


def _recorded(checkpoint: Path) -> tuple[str | None, str | None]:
    """Model and dtype of the run that a checkpoint belongs to."""
    file = recorded_config(checkpoint)
    if file is None:
        return None, None
    model = build_config(base=read_toml(file)).model
    return model.hf_checkpoint, model.dtype


def _dtype_of(folder: Path) -> str:
    """The dtype in a config.json; float32 if it names none."""
    config = json.loads((folder / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
