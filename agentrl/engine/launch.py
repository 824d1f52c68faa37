"""Starts SGLang servers and stops them: interpreter, flags, ports, log files, health while the process is watched, the whole process tree.

SGLang is never imported here: it lives in an environment of its own, whose interpreter is asked once where the package lies. Whatever
cannot work (no SGLang, an unknown flag, a port in use, too little memory) is one sentence before anything starts.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from agentrl.engine.weights import weight_bytes
from agentrl.errors import ConfigError, EngineFailure, suggest

LOG_LINES = 20
START_TIMEOUT_S = 600.0
STOP_GRACE_S = 1.0
POLL_S = 0.05
CPU_ENVIRONMENT = ".venv-sglang"
"""what `make setup-sglang-cpu` makes"""
_STUBS = Path(__file__).parent / "sglang_cpu" / "stubs"
_RESERVED = {
    "model-path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "engines listen on this machine only",
    "dtype": "--dtype",
    "context-length": "--rollout-max-context-len",
    "weight-version": "versions are agentrl's",
    "skip-tokenizer-init": "stop strings need the tokenizer",
    "dp-size": "give --rollout-num-gpus: several engines",
    "data-parallel-size": "give --rollout-num-gpus: several engines",
    "tp-size": "--rollout-num-gpus-per-engine",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "tp": "--rollout-num-gpus-per-engine",
}
"""flags of SGLang that agentrl sets itself, and what to use"""
_WHERE = (
    "import importlib.util as u,importlib.metadata as m\n"
    "s=u.find_spec('sglang')\n"
    "print(list(s.submodule_search_locations)[0] if s else '')\n"
    "print(m.version('sglang') if s else '')"
)


@dataclass(frozen=True)
class Installation:
    """An SGLang that was found."""

    python: Path
    package: Path
    version: str
    pythonpath: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The server's environment variables."""
        env = dict(os.environ, PYTHONUNBUFFERED="1")
        env.setdefault("NCCL_CUMEM_ENABLE", "0")  # else no NCCL group with a trainer can be formed
        path = [*self.pythonpath, *filter(None, [env.get("PYTHONPATH")])]
        if not gpus():
            path.insert(0, str(_STUBS))
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(path)
        return env


def find_installation(python: str | None = None, pythonpath: Sequence[str] = ()) -> Installation:
    """Where SGLang is: a given interpreter, else `.venv-sglang` beside us, else this interpreter.

    Raises:
        ConfigError: nowhere.
    """
    beside = [Path.cwd() / CPU_ENVIRONMENT, Path(__file__).parents[2] / CPU_ENVIRONMENT]
    tried = (
        [python]
        if python
        else [str(p / "bin/python") for p in beside if (p / "bin/python").exists()] + [sys.executable]
    )
    for candidate in tried:
        found = shutil.which(candidate)
        if found is None:
            raise ConfigError(f"--engine-python {candidate}: no such program")
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([*pythonpath, *filter(None, [os.environ.get("PYTHONPATH")])]))
        asked = subprocess.run([found, "-c", _WHERE], capture_output=True, text=True, env=env, timeout=60, check=False)
        package, _, version = asked.stdout.strip().partition("\n")
        if asked.returncode == 0 and package:
            return Installation(Path(found), Path(package), version.strip(), tuple(pythonpath))
    raise ConfigError(
        f"--engine sglang: no SGLang in {tried[0]}; on a GPU machine `pip install agentrl[sglang]`, on a CPU `make setup-sglang-cpu`, "
        "or name the interpreter that has it with --engine-python"
    )


def gpus() -> list[tuple[int, int]]:
    """(free, total) MiB of each GPU; empty: none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.split(",") for line in said.stdout.splitlines() if "," in line]
    return [(int(a), int(b)) for a, b in rows] if said.returncode == 0 else []


def known_flags(installation: Installation) -> set[str]:
    """Names of all server flags, read from the source of SGLang's ServerArgs without importing it."""
    import ast

    names: set[str] = set()
    base = installation.package / "srt"
    files = [base / "server_args.py", *sorted((base / "arg_groups").glob("fields/*.py"))]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
                names |= {f.target.id.replace("_", "-") for f in fields if isinstance(f.target, ast.Name)}
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"--[a-z][a-z0-9-]+", node.value)
            ):
                names.add(node.value[2:])
    return names


def check_flags(args: Mapping[str, Any], installation: Installation) -> None:
    """Refuse flags that SGLang lacks, and those that agentrl sets.

    Raises:
        ConfigError: one sentence.
    """
    known = known_flags(installation)
    for name in args:
        flag = name.replace("_", "-")
        if flag in _RESERVED:
            raise ConfigError(f"--sglang-{flag} is set by agentrl: {_RESERVED[flag]}")
        if flag not in known:
            raise ConfigError(f"SGLang {installation.version} has no flag --{flag}{suggest(flag, known)}")


@dataclass(frozen=True)
class LaunchSpec:
    """What to start."""

    model: Path
    dtype: str
    context_length: int
    engines: int = 1
    gpus_per_engine: int = 1
    first_gpu: int = 0
    memory_saver: bool = False
    """the engine will sleep (colocated)"""
    args: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's flags by name, without dashes in front; True: a flag without a value, False: left out"""


def check_spec(spec: LaunchSpec, installation: Installation) -> None:
    """Everything that can be known to fail before a server is started.

    Raises:
        ConfigError: one sentence.
    """
    check_flags(spec.args, installation)
    if not (spec.model / "config.json").exists():
        raise ConfigError(f"{spec.model} is no model folder: it has no config.json")
    port = spec.args.get("port")
    for n in range(spec.engines if port is not None else 0):
        if not port_is_free(int(str(port)) + n):
            raise ConfigError(
                f"--sglang-port {port}: port {int(str(port)) + n} is in use; leave the flag out to have a free one chosen"
            )
    cards = gpus()
    if not cards:
        return
    needed = spec.first_gpu + spec.engines * spec.gpus_per_engine
    if needed > len(cards):
        raise ConfigError(
            f"{spec.engines} engines of {spec.gpus_per_engine} GPUs need {needed} GPUs; this machine has {len(cards)}"
        )
    share = float(spec.args.get("mem_fraction_static", spec.args.get("mem-fraction-static", 0.88)))
    weights = weight_bytes(spec.model) / spec.gpus_per_engine / 2**20
    for number in range(spec.first_gpu, needed):
        free, total = cards[number]
        if weights > min(free, share * total):
            raise ConfigError(
                f"GPU {number} has {free} of {total} MiB free, the engine's share ({share:g}) is {share * total:.0f} MiB, "
                f"and the weights alone take {weights:.0f} MiB; use a smaller model, more GPUs per engine or a larger --sglang-mem-fraction-static"
            )


def port_is_free(port: int) -> bool:
    """Nobody listens on it."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def command_line(spec: LaunchSpec, installation: Installation, number: int, port: int) -> list[str]:
    """The server's command."""
    cpu = not gpus()
    flags: dict[str, Any] = {
        "model-path": spec.model,
        "dtype": spec.dtype,
        "context-length": spec.context_length,
        "host": "127.0.0.1",
        "port": port,
        "tp-size": spec.gpus_per_engine,
        "skip-server-warmup": True,
    }
    if cpu:
        flags |= {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
        flags |= {"disable-overlap-schedule": True, "sleep-on-idle": True}
        flags |= {"max-total-tokens": max(8192, 8 * spec.context_length), "max-running-requests": 32}
    else:
        flags |= {
            "base-gpu-id": spec.first_gpu + number * spec.gpus_per_engine,
            "enable-memory-saver": spec.memory_saver,
        }
    flags |= {k.replace("_", "-"): v for k, v in spec.args.items()} | {"port": port}
    words = [str(installation.python), "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    return words


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
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
                preexec_fn=_die_with_parent,
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
        """End the whole process tree; idempotent."""
        if self.process is None:
            return
        process, self.process = self.process, None
        _signal(process.pid, signal.SIGTERM)
        for _ in range(int(STOP_GRACE_S / POLL_S)):
            if process.poll() is not None and not session_members(process.pid):
                break
            await asyncio.sleep(POLL_S)
        for _ in range(3):
            _signal(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        await asyncio.to_thread(process.wait)


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


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
