"""`agentrl view`: show a run, or the runs in a folder, as a page in the browser."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from agentrl.cli.common import Commands, print_now, require_no_more
from agentrl.config import build_config, read_toml
from agentrl.core.machine_errors import report_machine_errors
from agentrl.errors import ConfigError, UsageError
from agentrl.render import Tokenizer
from agentrl.run.model_folder import model_folder
from agentrl.store.run_folder import recorded_config
from agentrl.view.episode_detail import Decode

TOKENIZER_HELP = "model folder to decode tokens with (default: the run's model)"


def add_parser(commands: Commands) -> None:
    about = "show a run, or a folder of runs, as a page in the browser, also while it is being written"
    parser = commands.add("view", run_view, about, settings=False, recorded=True)
    port = "port on 127.0.0.1; 0: any free one (default: %(default)s)"
    parser.add_argument("--port", type=int, default=8400, metavar="N", help=port)
    parser.add_argument("--tokenizer", metavar="DIR", help=TOKENIZER_HELP)


def run_view(args: argparse.Namespace, rest: list[str]) -> int:
    from agentrl.view.run_list import RunList, run_folders
    from agentrl.view.run_source import RunSource

    require_no_more(rest)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, found {args.port}")

    def open_run(path: Path) -> RunSource:
        return RunSource(path, *decoder(path, args.tokenizer))

    several = run_folders(args.recorded)
    asyncio.run(_serve(RunList(args.recorded, open_run) if several else open_run(args.recorded), args.port))
    return 0


async def _serve(source: Any, port: int) -> None:
    from agentrl.view.page_server import start

    report_machine_errors(asyncio.get_running_loop(), lambda text: print_now(f"agentrl view: {text}", sys.stderr))
    runner, port = await start(source, port)
    print_now(f"{source.path}: http://127.0.0.1:{port}/  (stop with Ctrl-C)")
    stop = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    await stop.wait()
    await runner.cleanup()


def decoder(recorded: Path, given: str | None) -> tuple[Decode | None, str]:
    """The function that decodes tokens; or None and the reason, because a run can be shown without its model.

    Nothing is downloaded for a model that only the run's config.toml names: looking at a folder of others fetches nothing.
    """
    config = recorded_config(recorded)
    if given is None and config is None:
        return None, "tokens are shown as ids: no config.toml names the model (give --tokenizer DIR)"
    try:
        name = given or build_config(base=read_toml(config or recorded)).model.hf_checkpoint
        return Tokenizer.load(model_folder(name, download=given is not None)).decode, ""
    except UsageError as e:
        if given is not None:
            raise
        return None, f"tokens are shown as ids: {e}"
