"""`agentrl export RUN`: one episode as a page, or all episodes as Parquet or as a data set."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentrl.cli.common import add_command, no_more, say_note
from agentrl.cli.view_command import decoder
from agentrl.errors import ConfigError
from agentrl.store import Recording
from agentrl.store.parquet import write_hf_dataset, write_parquet


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = "one episode as a single HTML file (--html), or all as Parquet (--parquet) or as a Hugging Face data set (--hf-dataset)"
    sub = add_command(commands, "export", run_export, about, settings=False)
    sub.add_argument("episode", nargs="?", metavar="EPISODE", help="its id (with --html)")
    kind = sub.add_mutually_exclusive_group(required=True)
    kind.add_argument("--html", type=Path, metavar="FILE.html")
    kind.add_argument("--parquet", type=Path, metavar="FILE.parquet")
    kind.add_argument("--hf-dataset", type=Path, metavar="FOLDER")
    sub.add_argument(
        "--tokenizer", metavar="DIR", help="a model folder to decode tokens with (default: the run's own model)"
    )


def run_export(args: argparse.Namespace, rest: list[str]) -> int:
    """`agentrl export`."""
    no_more("export", rest)
    if (args.episode is None) != (args.html is None):
        raise ConfigError("export: --html takes the id of one EPISODE; --parquet and --hf-dataset take none")
    recording = Recording(args.recorded)
    if args.html is not None:
        return _page(args, recording)
    write = write_parquet if args.parquet else write_hf_dataset
    target = args.parquet or args.hf_dataset
    rows = write(target, recording.records())
    say_note(recording)
    print(f"{target}: {rows} rows (one per segment) of {len(recording.episodes)} episodes")
    return 0


def _page(args: argparse.Namespace, recording: Recording) -> int:
    from agentrl.view.episode_detail import episode_detail
    from agentrl.view.html_export import html_of

    if args.html.exists():
        raise ConfigError(f"{args.html} already exists; choose a new file")
    decode, note = decoder(args.recorded, args.tokenizer)
    name = args.episode
    detail = episode_detail(
        recording.record(recording.entry(name)),
        recording.step_of(name),
        decode,
        recording.advantages.get(name),
        recording.images,
        recording.outputs,
    )
    args.html.write_text(html_of(detail | {"note": note}), encoding="utf-8")
    say_note(recording)
    print(f"{args.html}: {args.html.stat().st_size:,} bytes")
    return 0
