"""A genuine SGLang server for tests: one that runs already (AGENTRL_SGLANG=http://host:port and AGENTRL_SGLANG_MODEL=folder), otherwise
one started on this machine from `.venv-sglang` or AGENTRL_SGLANG_PYTHON, once per test run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.ports import free_port
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.installation import find_installation
from agentrl.engine.sglang.launch_spec import LaunchSpec, check_spec, command_line
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.errors import ConfigError

MODEL = Path(__file__).parents[1] / "agentrl/assets/search_r1_3m"
LENGTH = 512


@dataclass
class Running:
    address: str
    model: Path


def python() -> str | None:
    return os.environ.get("AGENTRL_SGLANG_PYTHON")


def available() -> bool:
    if os.environ.get("AGENTRL_SGLANG"):
        return True
    try:
        find_installation(python())
    except ConfigError:
        return False
    return True


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Running]:
    """A running server, whose log is in `folder`."""
    address = os.environ.get("AGENTRL_SGLANG")
    if address:
        yield Running(address, Path(os.environ["AGENTRL_SGLANG_MODEL"]))
        return
    installation = find_installation(python())
    spec = LaunchSpec(model=MODEL, dtype="float32", context_length=LENGTH)
    check_spec(spec, installation)
    port = free_port()
    command = command_line(spec, installation, 0, port)
    process = ServerProcess(command, installation.environment, folder / "engine.log", f"http://127.0.0.1:{port}")
    process.start()
    try:
        asyncio.run(process.wait_ready())
        yield Running(process.address, MODEL)
    finally:
        asyncio.run(process.stop())


@contextlib.asynccontextmanager
async def attached(server: Running, kind: type[SGLangEngine] = SGLangEngine) -> AsyncIterator[SGLangEngine]:
    """An engine on the server, which is reset: awake, not paused, at its first version, with an empty cache."""
    engine = kind(server.address, model_dir=server.model, context_length=LENGTH)
    await engine.start()
    await engine.resume()
    await engine.api.command("/update_weight_version", {"new_version": "default", "abort_all_requests": True})
    await engine.api.flush_cache()
    try:
        yield engine
    finally:
        await engine.close()
