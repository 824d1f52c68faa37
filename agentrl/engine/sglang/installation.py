"""Where SGLang is installed, and the GPUs of this machine. SGLang is never imported: it may live in a separate environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError

CPU_ENVIRONMENT = ".venv-sglang"
"""the environment that `make setup-sglang-cpu` creates"""
DEVICES = Path("/dev")
"""GPUs are counted here if nvidia-smi does not answer."""
_FIND_VERSION = """
import importlib.metadata, importlib.util
print(importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else "")
"""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """An installed SGLang."""

    python: Path
    version: str
    pythonpath: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the server."""
        env = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=_pythonpath(self.pythonpath))
        env.setdefault("NCCL_CUMEM_ENABLE", "0")  # otherwise no NCCL group with a trainer can be formed
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the positions of launch_spec.RESERVED
        if not gpus():
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return env


def find_installation(python: str | None = None, pythonpath: Sequence[str] = ()) -> Installation:
    """SGLang of a given interpreter, else of `.venv-sglang` in the current folder or beside the package, else of this interpreter.

    Raises:
        ConfigError: none of them has it.
    """
    if python:
        candidates = [python]
    else:
        environments = (Path.cwd() / CPU_ENVIRONMENT, Path(__file__).parents[3] / CPU_ENVIRONMENT)
        interpreters = [environment / "bin/python" for environment in environments]
        candidates = [*(str(p) for p in interpreters if p.exists()), sys.executable]
    env = dict(os.environ, PYTHONPATH=_pythonpath(pythonpath))
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None:
            raise ConfigError(f"--engine-python {candidate}: no such program")
        answer = subprocess.run(
            [path, "-c", _FIND_VERSION], capture_output=True, text=True, env=env, timeout=60, check=False
        )
        version = answer.stdout.strip()
        if answer.returncode == 0 and version:
            return Installation(python=Path(path), version=version, pythonpath=tuple(pythonpath))
    raise ConfigError(
        f"--engine sglang: {candidates[0]} has no SGLang; on a GPU machine `pip install agentrl[sglang]`, on a CPU `make setup-sglang-cpu`, "
        "or name the interpreter that has it with --engine-python"
    )


def _pythonpath(first: Sequence[str]) -> str:
    """PYTHONPATH with some folders in front."""
    return os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])


def gpus() -> list[tuple[int, int] | None]:
    """(free, total) MiB of each GPU that this process may use, in CUDA's order; None where the driver does not report it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=uuid,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        rows = [["", "", ""] for _ in DEVICES.glob("nvidia[0-9]*")]
    else:
        if answer.returncode != 0:
            return []
        lines = [line.split(",") for line in answer.stdout.splitlines()]
        rows = [[cell.strip() for cell in line] for line in lines if len(line) == 3]
    visible = visible_gpus(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [(int(free), int(total)) if free.isdecimal() and total.isdecimal() else None for _, free, total in visible]


def visible_gpus(rows: Sequence[list[str]], setting: str | None) -> list[list[str]]:
    """The rows (uuid first) that CUDA_VISIBLE_DEVICES selects: numbers or prefixes of uuids, up to the first that matches none."""
    if setting is None:
        return list(rows)
    selected = []
    for word in (w.strip() for w in setting.split(",")):
        number = int(word) if word.isdecimal() else -1
        matches = (row for i, row in enumerate(rows) if i == number or (len(word) > 4 and row[0].startswith(word)))
        row = next(matches, None)
        if row is None:
            break
        selected.append(row)
    return selected
