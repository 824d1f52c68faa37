"""Each import rule of pyproject.toml holds, and detects an illegal import that is planted in a copy of the package."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = {
    c["id"]: c["name"]
    for c in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
PLANTED = {
    "layers": ("core/seeds.py", "import agentrl.rollout.episode"),
    "protocols": ("engine/base.py", "import httpx"),
    "torch": ("rollout/episode.py", "import torch"),
    "builtins": ("envs/search_r1.py", "import agentrl.render.renderer"),
    "by-name": ("rollout/episode.py", "import agentrl.envs.search_r1"),
}
"""by contract: a file, and an import that the contract forbids there"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package beside its pyproject.toml; the links to envs, tools and rewards become folders."""
    folder = tmp_path_factory.mktemp("layers")
    ignored = shutil.ignore_patterns("__pycache__", "assets", "static", "*.so")
    shutil.copytree(ROOT / "agentrl", folder / "agentrl", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(folder, contract=None):
    """Exit status and output of import-linter."""
    only = ["--contract", contract] if contract else []
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", *only]
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_package_keeps_every_contract(copy):
    status, output = lint(copy)
    assert status == 0, output
    assert f"{len(CONTRACTS)} kept, 0 broken" in output


def test_an_import_is_planted_for_every_contract():
    assert PLANTED.keys() == CONTRACTS.keys()


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(copy, contract):
    file, line = PLANTED[contract]
    path = copy / "agentrl" / file
    code = path.read_text()
    path.write_text(f"{code}\n{line}\n")
    try:
        status, output = lint(copy, contract)
    finally:
        path.write_text(code)
    assert status == 1, output
    assert "0 kept, 1 broken" in output
    module = "agentrl." + file.removesuffix(".py").replace("/", ".")
    assert f"{module} -> {line.removeprefix('import ')}" in output or f"{module} is not allowed to import" in output
