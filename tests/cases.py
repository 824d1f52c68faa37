"""Cases that broke other systems, and inputs that agentrl itself got wrong before (`cases.toml`). Run their tests, all or some sections:

.venv/bin/python -m pytest $(.venv/bin/python tests/cases.py)
.venv/bin/python -m pytest $(.venv/bin/python tests/cases.py tokens parsing)

A case with a command instead of tests is not run by pytest.
"""

import sys
import tomllib
from pathlib import Path

FILE = Path(__file__).with_name("cases.toml")


def sections():
    """By section and name: {"holds": what must hold, "tests": ids below tests/, "commands": what else shows it}."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def ids_of(*names):
    """The ids of the tests of these sections, of all without a name; each once."""
    known = sections()
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{FILE.name} has no section {', '.join(unknown)}; it has {', '.join(known)}")
    cases = [case for name in names or known for case in known[name].values()]
    return list(dict.fromkeys(f"tests/{test}" for case in cases for test in case.get("tests", ())))


if __name__ == "__main__":
    print("\n".join(ids_of(*sys.argv[1:])))
