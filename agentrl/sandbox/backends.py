"""How a sandbox is closed off: by Linux namespaces, in a container, or by limits of processes alone. All run the same guest program."""

from __future__ import annotations

import functools
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ConfigError, UnknownNameError
from agentrl.sandbox.limits import SandboxLimits

PATH = "/usr/local/bin:/usr/bin:/bin"
TRIAL_TIMEOUT_S = 30.0


class Backend(Protocol):
    """A way to run the guest program. `python -ISc GUEST SETTINGS` reads requests from standard input and answers on standard output."""

    name: str
    note: str
    """one sentence: what it closes off, and what not"""

    def command(self, limits: SandboxLimits, folder: Path, *, packages: bool) -> list[str]:
        """The command that runs the guest.

        Args:
            limits: the sandbox's limits.
            folder: an empty folder that exists as long as the sandbox.
            packages: let the guest import the packages of this Python.
        """
        ...

    def why_not(self) -> str | None:
        """Why this machine cannot run it; None if it can."""
        ...


class Namespaces:
    """Linux namespaces, entered without further programs; as root, or in a user namespace where the kernel lets users create them."""

    name = "namespaces"
    note = (
        "sandbox: Linux namespaces; no network, no files but the system's programs, no processes but its own, memory and files limited; "
        "it is no protection against faults of the kernel"
    )

    def __init__(self, *, as_root: bool = True) -> None:
        """`as_root`: as root, use its rights instead of a user namespace, in which the kernel would not limit the number of root's processes."""
        self.as_root = as_root

    def command(self, limits: SandboxLimits, folder: Path, *, packages: bool) -> list[str]:
        """See `Backend`."""
        python = os.path.realpath(sys.executable)
        readable = [sys.base_prefix, os.path.dirname(os.path.dirname(python))]
        settings = guest_settings(limits, packages) | {
            "root": str(folder),
            "python": python,
            "path": PATH,
            "as_root": self.as_root,
            "readable": [*readable, *(_package_folders() if packages else ())],
            "files": limits.files,
        }
        return [python, "-ISc", _program("enter_namespaces"), json.dumps(settings), _program("guest")]

    def why_not(self) -> str | None:
        """See `Backend`."""
        if sys.platform != "linux":
            return "it needs Linux"
        if os.uname().machine not in ("x86_64", "aarch64"):
            return f"it does not know the system calls of {os.uname().machine}"
        return _trial(self)


class ProcessLimits:
    """Limits of processes (setrlimit) alone, for machines without namespaces and containers."""

    name = "process limits"
    note = (
        "sandbox: limits of processes only, as this machine offers neither namespaces nor a container; network and readable files are NOT closed "
        "off, and limits of memory and files hold per process"
    )

    def command(self, limits: SandboxLimits, folder: Path, *, packages: bool) -> list[str]:
        """See `Backend`."""
        settings = guest_settings(limits, packages) | {"processes": 0}  # the kernel counts all processes of the user
        environment = [f"PATH={PATH}", f"HOME={folder}", f"TMPDIR={folder}/tmp", "LANG=C.UTF-8"]
        python = [os.path.realpath(sys.executable), "-ISc", _program("guest"), json.dumps(settings)]
        return [shutil.which("env") or "/usr/bin/env", "-i", *environment, *python]

    def why_not(self) -> str | None:
        """See `Backend`."""
        return None


@dataclass(frozen=True)
class Container:
    """A container of docker or podman."""

    image: str = "python:3.12-slim"
    """an image with `python3`; it must be on the machine already"""
    program: str = ""
    """docker or podman; empty: the first one that is installed"""
    name = "container"
    note = (
        "sandbox: a container without network, read-only but for its work folder, memory, processes and files limited"
    )

    def command(self, limits: SandboxLimits, folder: Path, *, packages: bool) -> list[str]:
        """See `Backend`."""
        settings = guest_settings(limits, packages=False) | {"processes": 0}
        memory = limits.memory_bytes + limits.disk_bytes
        return [
            *(self._program() or "docker", "run", "--rm", "--interactive", "--pull", "never", "--network", "none"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"),
            *("--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(limits.processes)),
            *("--tmpfs", f"/work:size={limits.disk_bytes},nr_inodes={limits.files},mode=777"),
            *("--env", "HOME=/work", "--env", "TMPDIR=/work/tmp", "--env", "LANG=C.UTF-8"),
            *(self.image, "python3", "-ISc", _program("guest"), json.dumps(settings)),
        ]

    def why_not(self) -> str | None:
        """See `Backend`."""
        program = self._program()
        if program is None:
            return "neither docker nor podman is installed"
        try:
            found = subprocess.run(
                [program, "image", "inspect", self.image], capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"{program} does not answer: {e}"
        reason = found.stderr.strip().splitlines() or [f"exit status {found.returncode}"]
        return f"{program}: {reason[-1]}" if found.returncode else None

    def _program(self) -> str | None:
        return shutil.which(self.program) if self.program else shutil.which("docker") or shutil.which("podman")


def choose_backend(name: str = "auto") -> Backend:
    """The backend of a name; 'auto': namespaces where the machine has them, else a container, else limits of processes.

    Raises:
        ConfigError: this machine cannot run it.
        UnknownNameError: there is no such backend.
    """
    backends: dict[str, Backend] = {b.name: b for b in (Namespaces(), Container(), ProcessLimits())}
    if name == "auto":
        return next(b for b in backends.values() if b.why_not() is None)
    if name not in backends:
        raise UnknownNameError.of("sandbox backend", name, [*backends, "auto"])
    reason = backends[name].why_not()
    if reason is not None:
        raise ConfigError(f"the sandbox backend {name!r} cannot run here: {reason}; give another one, or 'auto'")
    return backends[name]


def guest_settings(limits: SandboxLimits, packages: bool) -> dict[str, Any]:
    """What the guest is told of its limits."""
    return {
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": limits.disk_bytes,
        "open_files": limits.open_files,
        "processes": limits.processes,
        "packages": _package_folders() if packages else [],
    }


@functools.cache
def _program(name: str) -> str:
    return files("agentrl.sandbox").joinpath(f"{name}.py").read_text(encoding="utf-8")


def _package_folders() -> list[str]:
    return [os.path.realpath(p) for p in site.getsitepackages() if os.path.isdir(p)]


@functools.cache
def _trial(backend: Namespaces) -> str | None:
    """Run the guest once without a request; None if it starts."""
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-") as folder:
        command = backend.command(SandboxLimits(), Path(folder), packages=False)
        try:
            trial = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return str(e)
    if '"ready"' in trial.stdout:
        return None
    return (trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"])[-1]
