"""Resolution of names, 'module:Object' and files, and the errors of names that cannot be resolved."""

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

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


def test_suggestions_are_names_that_the_module_defines():
    module = SimpleNamespace(Maze=Env, make=lambda: None, _private=Env, version="1")
    assert registry_module.public_names(module) == ["Maze", "make"]
