"""Where SGLang is installed, and what this machine's cards hold; found out without importing SGLang.

SGLang lives in an environment of its own, whose interpreter is asked once where the package lies.
"""

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
"""what `make setup-sglang-cpu` makes"""
DEVICES = Path("/dev")
"""where GPUs are counted if the driver takes too long to name them"""
_STUBS = Path(__file__).parents[1] / "sglang_cpu" / "stubs"
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
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = (
            "1"  # by the few positions that it keeps back (launch_spec.RESERVED)
        )
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
    beside = [Path.cwd() / CPU_ENVIRONMENT, Path(__file__).parents[3] / CPU_ENVIRONMENT]
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


def gpus() -> list[tuple[int, int] | None]:
    """(free, total) MiB of each GPU that this process may use, in CUDA's order, None where the driver does not say; empty: no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=uuid,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        rows = [["", "", ""] for _ in DEVICES.glob("nvidia[0-9]*")]
    else:
        rows = [[cell.strip() for cell in line.split(",")] for line in said.stdout.splitlines() if line.count(",") == 2]
        if said.returncode != 0:
            return []
    chosen = visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [(int(free), int(total)) if free.isdecimal() and total.isdecimal() else None for _, free, total in chosen]


def visible(cards: Sequence[list[str]], chosen: str | None) -> list[list[str]]:
    """The cards (uuid first) that CUDA_VISIBLE_DEVICES leaves: numbers or beginnings of uuids, up to the first that names none."""
    if chosen is None:
        return list(cards)
    found = []
    for word in (w.strip() for w in chosen.split(",")):
        number = int(word) if word.isdecimal() else -1
        card = next((c for n, c in enumerate(cards) if n == number or (len(word) > 4 and c[0].startswith(word))), None)
        if card is None:
            break
        found.append(card)
    return found
