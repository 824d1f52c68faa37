"""Resolution of names, 'module:Object' and files, and the errors of names that cannot be resolved."""

import importlib
import importlib.util
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.config.paths import anchor
from agentrl.config.settings import Config, EnvSettings
from agentrl.core import registry as registry_module
from agentrl.core.registry import Registry, load_file
from agentrl.env import ENVS, Env
from agentrl.errors import ConfigError, UnknownNameError, UsageError


@pytest.fixture
def names():
    return Registry("thing", {"decoder": "json:JSONDecoder", "broken": "json:Nothing"})


@pytest.fixture
def entry_point(monkeypatch):
    def add(name, value):
        entry = EntryPoint(name, value, "agentrl.things")
        monkeypatch.setattr(registry_module, "entry_points", lambda group: [entry] if group == "agentrl.things" else [])

    return add


def test_registered_and_built_in(names):
    import json

    @names.register("mine")
    def fn(): ...

    assert names.resolve("mine") is fn
    assert names.resolve("decoder") is json.JSONDecoder
    assert {"mine", "decoder"} <= set(names.names())


def test_module_and_object(names):
    from collections import OrderedDict

    assert names.resolve("collections:OrderedDict") is OrderedDict


def test_entry_points(names, entry_point):
    import collections

    entry_point("theirs", "collections:Counter")
    assert "theirs" in names.names()
    assert names.resolve("theirs") is collections.Counter


@pytest.mark.parametrize("value", ["no_such_module_at_all:X", "collections:Nothing"])
def test_a_broken_entry_point(names, entry_point, value):
    entry_point("theirs", value)
    with pytest.raises(ConfigError, match=r"thing 'theirs'.*entry point"):
        names.resolve("theirs")


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("decodr", UnknownNameError, "unknown thing 'decodr'; did you mean 'decoder'?"),
        ("", UnknownNameError, "unknown thing ''; known: broken, decoder"),
        ("broken", ConfigError, "thing 'broken': json has no 'Nothing'"),
        ("json:JSONDecodr", ConfigError, "json has no 'JSONDecodr'"),
        ("no_such_module_at_all:X", ConfigError, "cannot import no_such_module_at_all: ModuleNotFoundError"),
        ("json:", ConfigError, "add the name of the object, as in json:Name"),
        (":X", ConfigError, "found '' before the ':'"),
        (".json:X", ConfigError, "expected package.module:Object"),
        ("a b:X", ConfigError, "expected package.module:Object"),
        ("nowhere.py:X", ConfigError, "no such file"),
        ("nowhere.py", ConfigError, "no such file"),
    ],
)
def test_names_that_cannot_be_resolved_are_refused(names, name, error, says):
    with pytest.raises(error) as caught:
        names.resolve(name)
    assert says in str(caught.value)
    assert isinstance(caught.value, UsageError)


ENV_FILE = """
from agentrl import Env

class Maze(Env):
    async def step(self, action): ...

class Helper: ...
"""


class TestFiles:
    def test_an_object_by_name(self, tmp_path, names):
        (tmp_path / "maze.py").write_text(ENV_FILE)
        found = names.resolve(f"{tmp_path}/maze.py:Helper")
        assert found.__name__ == "Helper"

    def test_the_only_env_of_a_file(self, tmp_path):
        (tmp_path / "maze.py").write_text(ENV_FILE)
        found = ENVS.resolve(f"{tmp_path}/maze.py")
        assert issubclass(found, Env)
        assert found.__name__ == "Maze"

    def test_one_file_is_one_module_whatever_its_path_looks_like(self, tmp_path, names, monkeypatch):
        (tmp_path / "maze.py").write_text(ENV_FILE)
        monkeypatch.chdir(tmp_path)
        assert names.resolve("maze.py:Maze") is names.resolve(f"{tmp_path}/../{tmp_path.name}/maze.py:Maze")

    def test_files_of_the_same_name_are_different_modules(self, tmp_path):
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "maze.py").write_text(f"WHERE = {folder!r}")
        assert [load_file(tmp_path / folder / "maze.py").WHERE for folder in ("a", "b")] == ["a", "b"]

    def test_dataclasses_and_late_hints_work_in_them(self, tmp_path):
        text = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n"
        (tmp_path / "maze.py").write_text(text)
        assert load_file(tmp_path / "maze.py").A().x == 1

    def test_two_envs_in_a_file_need_a_name(self, tmp_path):
        (tmp_path / "maze.py").write_text(ENV_FILE + "\nclass Other(Env): ...\n")
        with pytest.raises(ConfigError, match="add the name of the object"):
            ENVS.resolve(f"{tmp_path}/maze.py")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("def f(:", "SyntaxError"),
            ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
            ("x = 1\n1 / 0", "maze.py, line 2: ZeroDivisionError: division by zero"),
            ("from agentrl import tool\n@tool(timeout=3)\ndef t(): ...", "maze.py, line 2: TypeError: .*'timeout'"),
            ("import sys\nsys.exit(0)", "maze.py, line 2: SystemExit: 0"),
        ],
    )
    def test_a_file_that_cannot_be_imported_is_forgotten(self, tmp_path, names, text, says):
        path = tmp_path / "maze.py"
        path.write_text(text)
        before = set(sys.modules)
        with pytest.raises(ConfigError, match=says):
            names.resolve(f"{path}:Maze")
        assert not [m for m in set(sys.modules) - before if m.startswith("agentrl_user_")]
        path.write_text(ENV_FILE + "# mended, and longer than before\n")
        assert names.resolve(f"{path}:Maze").__name__ == "Maze"

    def test_a_folder(self, tmp_path, names):
        (tmp_path / "maze.py").mkdir()
        with pytest.raises(ConfigError, match="cannot import"):
            names.resolve(f"{tmp_path}/maze.py:X")


MY_ENV = """
import helper
from agentrl import Env

class My(Env):
    value = helper.VALUE

    def late(self):
        from later import VALUE
        return VALUE
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes folders with an environment and its modules; what they import is forgotten afterwards."""
    others = [entry for entry in sys.path if (Path(entry) / "my_env.py").exists()]  # of tests that ran before
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in others])
    monkeypatch.setattr(registry_module, "_code_folders", set())
    before = set(sys.modules)

    def make(name="two", **modules):
        made = tmp_path / name
        made.mkdir()
        for module, text in {"my_env": MY_ENV, "helper": "VALUE = 1", "later": "VALUE = 2", **modules}.items():
            path = made / f"{module.replace('__', '/', 1)}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return made

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


class TestSeveralFiles:
    def test_a_file_imports_its_neighbours(self, folder, monkeypatch):
        made = folder()
        monkeypatch.chdir(made.parent)
        my = ENVS.resolve("two/my_env.py")
        assert (my.value, my().late()) == (1, 2)

    def test_a_module_in_the_working_directory(self, folder, monkeypatch):
        monkeypatch.chdir(folder())
        my = ENVS.resolve("my_env:My")
        assert (my.value, my().late()) == (1, 2)
        assert ENVS.resolve("my_env:My") is my
        assert ENVS.resolve("my_env.py:My") is my

    def test_a_package_in_the_working_directory(self, folder, monkeypatch):
        made = folder(
            pack____init__="",
            pack__env=MY_ENV.replace("import helper", "from pack import helper"),
            pack__helper="VALUE = 3",
        )
        monkeypatch.chdir(made)
        assert ENVS.resolve("pack.env:My").value == 3

    def test_an_installed_module_comes_before_one_of_its_name_in_the_working_directory(
        self, folder, monkeypatch, names
    ):
        monkeypatch.chdir(folder(wave="Wave_read = 0"))
        assert names.resolve("wave:Wave_read") != 0

    def test_a_package_beside_it(self, folder):
        made = folder(helper____init__="from helper.part import VALUE", helper__part="VALUE = 4")
        (made / "helper.py").unlink()
        assert ENVS.resolve(f"{made}/my_env.py").value == 4

    def test_neighbours_come_first_for_its_own_code_and_last_for_all_other_code(self, folder, caplog):
        made = folder(my_env=MY_ENV.replace("import helper", "import wave as helper"), wave="VALUE = 5")
        sys.modules.pop("wave", None)
        assert ENVS.resolve(f"{made}/my_env.py").value == 5
        assert sys.path[-1] == str(made)
        assert "its module wave hides the installed" in caplog.text

    def test_a_neighbour_that_nobody_imports_hides_nothing(self, folder, caplog):
        sys.modules.pop("colorsys", None)
        ENVS.resolve(f"{folder(colorsys='VALUE = 5')}/my_env.py")
        assert "two" not in importlib.util.find_spec("colorsys").origin
        assert not caplog.text

    def test_neighbours_of_the_same_name_in_two_folders_are_two_modules(self, folder, caplog):
        one, two = folder("one"), folder("two", helper="VALUE = 6")
        assert [ENVS.resolve(f"{made}/my_env.py").value for made in (one, two)] == [1, 6]
        assert f"{two}: imports its own helper" in caplog.text

    def test_a_module_of_the_folder_itself_stays_the_one_that_it_is(self, folder, monkeypatch):
        made = folder()
        monkeypatch.setattr(registry_module, "_code_folders", {made.parent})
        monkeypatch.syspath_prepend(str(made))
        helper = importlib.import_module("helper")
        assert ENVS.resolve(f"{made}/my_env.py").value == 1
        assert sys.modules["helper"] is helper

    def test_a_file_that_fails_is_forgotten_with_its_neighbours(self, folder):
        made = folder(helper="VALUE = 1 / 0")
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            ENVS.resolve(f"{made}/my_env.py")
        (made / "helper.py").write_text("VALUE = 7  # mended, and longer than before")
        assert ENVS.resolve(f"{made}/my_env.py").value == 7

    def test_the_settings_hold_the_path_of_a_module_in_the_working_directory(self, folder, monkeypatch):
        made = folder()
        monkeypatch.chdir(made)
        config = Config(env=EnvSettings(env="my_env:My", reward=("my_env:score=2", "em=1", "helper")))
        env = anchor(config).env
        assert (env.env, env.reward) == (f"{made}/my_env.py:My", (f"{made}/my_env.py:score=2", "em=1", "helper"))


def test_suggestions_are_names_that_the_module_defines():
    module = SimpleNamespace(Maze=Env, make=lambda: None, _private=Env, version="1")
    assert registry_module.public_names(module) == ["Maze", "make"]
