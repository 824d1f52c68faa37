"""A sandbox: a process that runs Python code and shell commands, and keeps variables and files from call to call."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from agentrl.errors import InfraError
from agentrl.sandbox.backends import Backend, ProcessLimits, choose_backend
from agentrl.sandbox.limits import SandboxLimits

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Time limit for the start of the guest program."""
GRACE_S = 15.0
"""Time beyond the call's own limit, after which a guest that does not answer is killed."""
MAX_ANSWER_BYTES = 256 << 20
Status = Literal["ok", "error", "timeout", "memory", "died"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a call did."""

    status: Status
    """'error': the code raised, or the command's exit status is not 0; 'died': the code ended its process; 'memory', 'timeout': a limit ended it"""
    output: str
    """standard output and standard error together, truncated to `SandboxLimits.output_bytes`"""
    output_bytes: int
    """length of the whole output"""
    state_lost: bool
    """variables are lost; files are kept unless the sandbox itself ended"""
    detail: str = ""
    """how the process ended, if it did"""
    duration_s: float = 0.0

    def text(self) -> str:
        """The result as a policy reads it: the output, and a note on what was cut or ended."""
        notes = []
        kept = len(self.output.encode())
        if self.output_bytes > kept:
            notes.append(f"output cut: the first {kept} of {self.output_bytes} bytes")
        reason = {
            "timeout": "the time limit interrupted the code",
            "memory": "the memory limit ended the code",
            "died": f"the process {self.detail or 'ended'}",
        }.get(self.status)
        if reason:
            notes.append(reason + ("; its variables are lost" if self.state_lost else ""))
        return "\n".join([*([self.output.rstrip("\n")] if self.output else []), *(f"[{note}]" for note in notes)])


class Sandbox:
    r"""Runs code that nobody trusts. It starts with its first call; `close` ends it with everything that it started.

    Args:
        limits: see `SandboxLimits`.
        backend: a name for `choose_backend`, or a backend.
        packages: let the code import the packages of this Python, such as numpy; else the standard library only.

    Raises:
        ConfigError: this machine cannot run the backend.

    Example:
        >>> async def main():
        ...     async with Sandbox() as sandbox:
        ...         await sandbox.python("x = 6")
        ...         return await sandbox.python("x * 7")
        >>> asyncio.run(main()).output
        '42\n'
    """

    def __init__(
        self, limits: SandboxLimits | None = None, backend: str | Backend = "auto", *, packages: bool = False
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.backend = choose_backend(backend) if isinstance(backend, str) else backend
        self.packages = packages
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        _report_once(self.backend)

    async def python(self, code: str) -> RunResult:
        """Run Python code. The value of a last expression is printed, as in an interactive interpreter.

        Raises:
            InfraError: the sandbox cannot be started.
        """
        return await self._run("python", code)

    async def shell(self, command: str) -> RunResult:
        """Run a shell command. The next one starts in the folder, and with the exported variables, with which this one ended.

        Raises:
            InfraError: the sandbox cannot be started.
        """
        return await self._run("shell", command)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below the work folder, where code starts.

        Raises:
            InfraError: the sandbox cannot be started, or has ended.
            OSError: the file cannot be written, for example since the sandbox is full.
        """
        await self._file({"op": "write", "path": path, "data": base64.b64encode(data).decode()})

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The first `max_bytes` bytes of a file below the work folder. Links that lead out of it are refused.

        Raises:
            InfraError: the sandbox cannot be started, or has ended.
            OSError: there is no such regular file.
        """
        answer = await self._file({"op": "read", "path": path, "max_bytes": max_bytes})
        return base64.b64decode(answer.get("data", ""))

    async def close(self) -> None:
        """End the sandbox and everything that it started; its files are lost. A further call starts another one."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            await _end(process, isinstance(self.backend, ProcessLimits), folder)
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, operation: str, code: str) -> RunResult:
        started = time.perf_counter()
        request = {
            "op": operation,
            "code": code.encode("utf-8", errors="replace").decode(),
            "time_s": self.limits.time_s,
            "max_output_bytes": self.limits.output_bytes,
        }
        answer = await self._request(request)
        elapsed = time.perf_counter() - started
        if answer is None:
            return RunResult(
                status="died",
                output="",
                output_bytes=0,
                state_lost=True,
                detail="and its sandbox ended",
                duration_s=elapsed,
            )
        return _result(answer, elapsed)

    async def _file(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await self._request(request)
        if answer is None:
            raise InfraError("the sandbox ended while a file was transferred")
        if "error" in answer:
            raise OSError(f"sandbox, {request['path']}: {answer['error']!s:.200}")
        return answer

    async def _request(self, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The guest's answer; None if it ended, did not answer, or answered nonsense, as code that reaches it might make it do."""
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                await self.close()
                await self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            try:
                async with asyncio.timeout(float(request.get("time_s", 0)) + GRACE_S):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    await process.stdin.drain()
                    answer = await _read_answer(process)
            except (OSError, TimeoutError):
                answer = None
            except BaseException:
                await self.close()
                raise
            if answer is None:
                await self.close()
            return answer

    async def _start(self) -> None:
        """Raises InfraError."""
        self._folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agentrl-sandbox-"))
        command = self.backend.command(self.limits, self._folder, packages=self.packages)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=MAX_ANSWER_BYTES,
            )
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await _read_answer(self._process)
        except (OSError, TimeoutError) as e:
            await self.close()
            raise InfraError(f"a sandbox cannot be started: {type(e).__name__}: {e}") from e
        if ready is None or not ready.get("ready"):
            assert self._process.stderr is not None
            said = (await self._process.stderr.read(4096)).decode(errors="replace").strip().splitlines()
            await self.close()
            raise InfraError(f"a sandbox cannot be started: {said[-1] if said else 'it ended'}")


async def _read_answer(process: asyncio.subprocess.Process) -> Mapping[str, Any] | None:
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        answer = json.loads(line)
    except ValueError:  # not JSON, or longer than the limit
        return None
    return answer if isinstance(answer, dict) else None


def _result(answer: Mapping[str, Any], elapsed: float) -> RunResult:
    """The result that the guest reports; what it reports is not trusted further than to be shown."""
    status: Any = answer.get("status")
    output = answer.get("output")
    total = answer.get("bytes")
    return RunResult(
        status=status if status in ("ok", "error", "timeout", "memory", "died") else "died",
        output=base64.b64decode(output if isinstance(output, str) else "").decode(errors="replace"),
        output_bytes=total if isinstance(total, int) else 0,
        state_lost=bool(answer.get("state_lost")),
        detail=str(answer.get("how", ""))[:200],
        duration_s=elapsed,
    )


async def _end(process: asyncio.subprocess.Process, marked: bool, folder: Path | None) -> None:
    """Close the guest's input, which ends it with what it started; kill what remains."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        if marked:  # without namespaces the guest itself kills what it started
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await process.wait()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if marked and folder is not None:
        await asyncio.to_thread(_kill_started_in, folder)


def _kill_started_in(folder: Path) -> None:
    """Kill the processes whose environment names the sandbox's folder: those that outlived its guest."""
    mark = f"HOME={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


_reported: set[str] = set()


def _report_once(backend: Backend) -> None:
    """Log what the backend closes off: as a warning where that is not everything."""
    if backend.note not in _reported:
        _reported.add(backend.note)
        logger.log(logging.WARNING if isinstance(backend, ProcessLimits) else logging.INFO, backend.note)
