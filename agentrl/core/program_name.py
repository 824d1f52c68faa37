"""How the user calls the command line, for messages that name a command to run next."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def command(*words: str | Path) -> str:
    """A command line of agentrl that the user can enter as it stands."""
    return shlex.join([program_name(), *map(str, words)])


def program_name() -> str:
    """`agentrl` if the shell finds it, otherwise the path of the script beside this Python, relative to the working directory if it is in it."""
    script = Path(sys.executable).with_name("agentrl")
    if shutil.which("agentrl") or not script.exists():
        return "agentrl"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
