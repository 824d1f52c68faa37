"""`agentrl view RUN`: the run as a page, on loopback."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from typing import Any

from agentrl.cli.common import add_command, no_more
from agentrl.config import build_config, read_toml
from agentrl.errors import ConfigError, UsageError
from agentrl.render import Tokenizer
from agentrl.run.model_folder import model_folder
from agentrl.view.episode_detail import Decode


def add_parser(commands: Any) -> None:
    """Add the command."""
    sub = add_command(
        commands,
        "view",
        run_view,
        "show a run as a page in the browser, also while it is being written",
        settings=False,
    )
    sub.add_argument("--port", type=int, default=8400, help="on 127.0.0.1 (default 8400; 0: any free one)")
    sub.add_argument(
        "--tokenizer", metavar="DIR", help="a model folder to decode tokens with (default: the run's own model)"
    )


def run_view(args: argparse.Namespace, rest: list[str]) -> int:
    """`agentrl view`."""
    from agentrl.view.run_source import RunSource

    no_more("view", rest)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"view: --port must be from 0 to 65535, found {args.port}")
    decode, note = decoder(args.recorded, args.tokenizer)
    asyncio.run(_serve(RunSource(args.recorded, decode, note), args.port))
    return 0


async def _serve(source: Any, port: int) -> None:
    from agentrl.view.page_server import start

    runner, port = await start(source, port)
    print(f"{source.path}: http://127.0.0.1:{port}/  (stop with Ctrl-C)", flush=True)
    stop = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    await stop.wait()
    await runner.cleanup()


def decoder(recorded: Path, given: str | None) -> tuple[Decode | None, str]:
    """How to decode tokens, or None and why not: a run can be looked at without its model."""
    near = [recorded / "config.toml", recorded.parent / "config.toml", recorded.parent.parent / "config.toml"]
    found = next((p for p in near if p.exists()), None)
    if given is None and found is None:
        return None, "tokens are shown as ids: no config.toml says which model they are of (give --tokenizer DIR)"
    try:
        name = given or build_config(read_toml(found or recorded)).model.hf_checkpoint
        return Tokenizer.load(model_folder(name)).decode, ""
    except UsageError as e:
        if given is not None:
            raise
        return None, f"tokens are shown as ids: {e}"
