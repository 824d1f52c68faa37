"""A server's process: started, watched while it gets ready, stopped with its whole tree. Whatever it says goes into a log file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import aiohttp

from agentrl.errors import EngineFailure

LOG_LINES = 20
START_TIMEOUT_S = 600.0
STOP_GRACE_S = 1.0
KILL_TIMEOUT_S = 60.0
POLL_S = 0.05
_DIE_WITH_PARENT = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""becomes the server, after it has asked the kernel (PR_SET_PDEATHSIG) to end it with us; a function run between fork and exec could deadlock"""


class ServerProcess:
    """One server: started, watched, stopped, and started again."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, address: str) -> None:
        self.command, self.env, self.log, self.address = list(command), dict(env), log, address
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; call it from the thread that lives as long as the server may (the kernel ends the server with it)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-ISc", _DIE_WITH_PARENT, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """The process runs."""
        return self.process is not None and self.process.poll() is None

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it answers /health.

        Raises:
            EngineFailure: it died (with the end of its log), or takes too long.
        """
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                if not self.alive:
                    self.fail("died while it started")
                if await _healthy(session, self.address):
                    return
                if time.monotonic() > deadline:
                    self.fail(f"was not ready within {timeout_s:g} s")
                await asyncio.sleep(0.25)

    def fail(self, what: str) -> NoReturn:
        """Raise an EngineFailure with the end of the log."""
        code = self.process.poll() if self.process else None
        how = "" if code is None else f" (killed by {signal.Signals(-code).name})" if code < 0 else f" (status {code})"
        raise EngineFailure(f"the SGLang server at {self.address} {what}{how}{self.tail()}", "engine: server died")

    def tail(self) -> str:
        """The end of the log, for messages."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.exists() else []
        return f"; the end of {self.log}:\n" + "\n".join(lines) if lines else f"; {self.log} is empty"

    async def stop(self) -> None:
        """End the whole process tree; idempotent, and again after a call that was cancelled.

        Raises:
            EngineFailure: the kernel does not let it go.
        """
        process = self.process
        if process is None:
            return
        _signal(process.pid, signal.SIGTERM)
        for _ in range(int(STOP_GRACE_S / POLL_S)):
            if process.poll() is not None and not session_members(process.pid):
                break
            await asyncio.sleep(POLL_S)
        for _ in range(3):
            _signal(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        try:
            await asyncio.to_thread(process.wait, KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise EngineFailure(
                f"the SGLang server at {self.address} (pid {process.pid}) was killed and does not end within {KILL_TIMEOUT_S:g} s; "
                "its card may hang",
                "engine: server does not end",
            ) from None
        if self.process is process:
            self.process = None


def session_members(session: int) -> list[int]:
    """Processes of a session (a server leads one of its own), zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def _signal(session: int, number: int) -> None:
    for pid in session_members(session):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


async def _healthy(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(f"{address}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
