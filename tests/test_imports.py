"""The cost of importing agentrl, and its exports."""

import importlib
import subprocess
import sys

import pytest

import agentrl

HEAVY = (
    "torch",
    "megatron",
    "transformers",
    "tokenizers",
    "numpy",
    "aiohttp",
    "httpx",
    "matplotlib",
    "gymnasium",
    "bm25s",
    "ray",
)


def loaded_by(code):
    """The heavy packages among the modules that a fresh interpreter has after running the code."""
    code = f"import sys\n{code}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}} & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_writing_an_environment_loads_nothing_heavy():
    code = """
from agentrl import Env, StepResult, Tool, ToolEnv, reward, tool
class Mine(ToolEnv):
    @tool
    def look(self, what: str) -> str:
        '''Look.'''
        return what
@reward
def good(trajectory): return 1.0
Mine().tool_specs()
"""
    assert loaded_by(code) == []


def test_the_protocols_and_the_command_line_load_no_torch():
    loaded = loaded_by(
        "import agentrl.engine.base, agentrl.train.base, agentrl.rollout.episode, agentrl.config, agentrl.cli.main"
    )
    assert not {"torch", "megatron"} & set(loaded)


@pytest.mark.parametrize("name", agentrl.__all__)
def test_every_exported_name_exists_and_is_documented(name):
    assert getattr(agentrl, name).__doc__


def test_exports_are_sorted_and_complete():
    public = {
        n
        for n, o in vars(agentrl).items()
        if getattr(o, "__module__", "").startswith("agentrl.") and not n.startswith("_")
    }
    assert sorted(public) == sorted(agentrl.__all__)
    assert list(agentrl.__all__) == sorted(agentrl.__all__)


def test_built_ins_have_one_name():
    module = importlib.import_module("agentrl.envs")
    assert module.__name__ == "agentrl.envs"
    assert "envs" not in sys.modules
    assert "tools" not in sys.modules
    assert "rewards" not in sys.modules
