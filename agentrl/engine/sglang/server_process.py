"""The process of one SGLang server: started, watched until it is ready, and stopped with its whole process tree. Its output goes into a log file."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from agentrl.core.child_process import killed_with_parent, session_members, signal_session
from agentrl.engine.sglang.http import HttpClient
from agentrl.engine.sglang.shared_memory import Journal, mapped_files, remove_left_by_killed_servers, remove_unmapped
from agentrl.errors import EngineFailure

LOG_LINES = 20
HEALTH_S = 5.0
START_TIMEOUT_S = 600.0
STOP_GRACE_S = 1.0
KILL_TIMEOUT_S = 60.0
POLL_S = 0.05


class ServerProcess:
    """One server's process, which can be started again after it stopped."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, address: str) -> None:
        self.command, self.env, self.log, self.address = list(command), dict(env), log, address
        self.process: subprocess.Popen[bytes] | None = None
        self._memory: set[Path] = set()
        """what the processes that are being ended have in shared memory"""
        self._journal = Journal()

    def start(self) -> None:
        """Start the process. The kernel kills it when the calling thread ends."""
        remove_left_by_killed_servers()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                killed_with_parent(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.env,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the server answers /health.

        Raises:
            EngineFailure: it died, or was not ready in time. The message has the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        http = HttpClient(self.address)
        try:
            while True:
                if not self.alive:
                    self.fail("died while it started")
                try:
                    await http.get("/health", timeout_s=HEALTH_S)
                    await asyncio.to_thread(self._note_memory)
                    return
                except EngineFailure:
                    if time.monotonic() > deadline:
                        self.fail(f"was not ready within {timeout_s:g} s")
                await asyncio.sleep(0.25)
        finally:
            await http.close()

    def _note_memory(self) -> None:
        """Note what the server has in shared memory, for the next start if this process is killed."""
        assert self.process is not None
        self._journal.write(mapped_files(session_members(self.process.pid)))

    def fail(self, what: str) -> NoReturn:
        """Raise an EngineFailure with the end of the log."""
        code = self.process.poll() if self.process else None
        how = "" if code is None else f" (killed by {signal.Signals(-code).name})" if code < 0 else f" (status {code})"
        raise EngineFailure(f"the SGLang server at {self.address} {what}{how}{self.log_end()}", "engine: server died")

    def log_end(self) -> str:
        """The last lines of the log, for error messages."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.exists() else []
        return f"; the end of {self.log}:\n" + "\n".join(lines) if lines else f"; {self.log} is empty"

    async def stop(self) -> None:
        """End the whole process tree. Idempotent, and safe to repeat after a cancelled call.

        Raises:
            EngineFailure: the process does not end although it was killed.
        """
        process = self.process
        if process is None:
            return
        self._memory |= mapped_files(session_members(process.pid))
        signal_session(process.pid, signal.SIGTERM)
        for _ in range(int(STOP_GRACE_S / POLL_S)):
            if process.poll() is not None and not session_members(process.pid):
                break
            await asyncio.sleep(POLL_S)
        for _ in range(3):  # a dying process may still have started another
            signal_session(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        try:
            await asyncio.to_thread(process.wait, KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise EngineFailure(
                f"the SGLang server at {self.address} (pid {process.pid}) was killed and does not end within {KILL_TIMEOUT_S:g} s; "
                "its GPU may hang",
                "engine: server does not end",
            ) from None
        await asyncio.to_thread(remove_unmapped, self._memory)
        self._journal.remove()
        if self.process is process:
            self.process, self._memory = None, set()
