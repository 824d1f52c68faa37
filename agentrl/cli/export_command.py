"""`agentrl export`: one episode as a page, or all episodes as Parquet or as a data set."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.common import Commands, print_note, print_now, require_no_more
from agentrl.cli.view_command import TOKENIZER_HELP, decoder
from agentrl.core.atomic_write import new_file
from agentrl.errors import ConfigError
from agentrl.store import Recording
from agentrl.store.parquet import write_hf_dataset, write_parquet


def add_parser(commands: Commands) -> None:
    about = "export one episode as an HTML file, or all episodes as Parquet or as a Hugging Face data set"
    parser = commands.add("export", run_export, about, settings=False, recorded=True)
    parser.add_argument("episode", nargs="?", metavar="EPISODE", help="id of the episode, with --html")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--html", type=Path, metavar="FILE.html", help="write one episode as a single HTML file")
    target.add_argument("--parquet", type=Path, metavar="FILE.parquet", help="write all episodes, one row per segment")
    target.add_argument("--hf-dataset", type=Path, metavar="FOLDER", help="write the same rows as a data set")
    parser.add_argument("--tokenizer", metavar="DIR", help=TOKENIZER_HELP)


def run_export(args: argparse.Namespace, rest: list[str]) -> int:
    require_no_more(rest)
    if (args.episode is None) != (args.html is None):
        raise ConfigError("--html takes the id of one EPISODE; --parquet and --hf-dataset take none")
    recording = Recording(args.recorded)
    if args.html is not None:
        return _export_page(args, recording)
    write = write_parquet if args.parquet else write_hf_dataset
    target = args.parquet or args.hf_dataset
    rows = write(target, recording.records())
    print_note(recording)
    print_now(f"{target}: {rows} rows (one per segment) of {len(recording.episodes)} episodes")
    return 0


def _export_page(args: argparse.Namespace, recording: Recording) -> int:
    from agentrl.view.episode_detail import episode_detail
    from agentrl.view.html_export import html_of

    if args.html.exists():
        raise ConfigError(f"{args.html} already exists; choose a new file")
    decode, note = decoder(args.recorded, args.tokenizer)
    detail = episode_detail(
        recording.record(recording.entry(args.episode)),
        recording.step_of(args.episode),
        decode,
        recording.advantages.get(args.episode),
        recording.images,
        recording.outputs,
    )
    with new_file(args.html) as file:
        file.write_text(html_of(detail | {"note": note}), encoding="utf-8")
    print_note(recording)
    print_now(f"{args.html}: {args.html.stat().st_size:,} bytes")
    return 0
