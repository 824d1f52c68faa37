"""Env and ToolEnv: their defaults, how they are found and created."""

import pytest
from doubles import PARIS, settled

from agentrl import Env, Tool, ToolEnv, register_env, tool
from agentrl.env import check_env_args, make_env_class, tool_messages
from agentrl.errors import ConfigError, ContractError, UnknownNameError
from agentrl.types import Action, ParseError, Task, ToolResult


class Shelf(Env):
    name = "shelf"

    def __init__(self, size: int, colour: str = "red", **_):
        self.size = size

    @tool
    def look(self) -> str:
        """Look."""
        return "books"


class Strict(Env):
    def __init__(self, size: int, colour: str = "red"):
        self.size = size


async def test_the_first_observation_is_the_tasks_prompt():
    assert await settled(Env().reset(PARIS, seed=0)) == [{"role": "user", "content": "What is the capital of France?"}]
    task = Task("x", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    assert await settled(Env().reset(task, seed=0)) == list(task.prompt)


def test_tasks_must_come_from_somewhere():
    with pytest.raises(ConfigError, match="environment shelf has no tasks; give some with --prompt-data"):
        Shelf.tasks("train")
    assert (Shelf.label(), Strict.label()) == ("shelf", "Strict")


@pytest.mark.parametrize(
    ("cls", "args", "message"),
    [
        (Strict, {}, "Strict needs an argument 'size'; give --env-arg size=VALUE"),
        (Shelf, {"colour": "x"}, "needs an argument 'size'"),
        (Strict, {"size": 1, "color": "x"}, "takes no argument 'color'; did you mean 'colour'"),
        (Env, {"x": 1}, "takes no argument 'x'"),
    ],
)
def test_constructor_arguments_are_checked_before_anything_starts(cls, args, message):
    with pytest.raises(ConfigError, match=message):
        check_env_args(cls, args)


@pytest.mark.parametrize(("cls", "args"), [(Strict, {"size": 1}), (Shelf, {"size": 1, "anything": 2}), (Env, {})])
def test_constructor_arguments_that_fit(cls, args):
    check_env_args(cls, args)
    cls(**args)


class Counter(Tool):
    def call(self, n: int) -> int:
        """Count."""
        return n


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Tools(Shelf):
    tools = (add, Counter)


def test_tools_are_those_of_the_class_then_methods_and_classes_get_an_instance_each():
    a, b = Tools(1), Tools(1)
    assert [s.name for s in a.tool_specs()] == ["add", "counter", "look"]
    b.tool_specs()
    assert len(a.tool_instances) == len(b.tool_instances) == 1
    assert a.tool_instances[0] is not b.tool_instances[0]


def test_two_tools_of_one_name_are_refused():
    class Twice(Shelf):
        tools = (add, tool(name="look")(lambda: "x"))

    with pytest.raises(ContractError, match=r"two tools of the same name: \['look'\]"):
        Twice(1).tool_specs()


def test_tool_messages():
    results = (ToolResult("c0", "add", "3"), ToolResult("c1", "add", "error: x", is_error=True))
    action = Action("x", results=results, errors=(ParseError("content", "not JSON"),))
    assert tool_messages(action) == [
        {"role": "tool", "name": "add", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "error: x"},
        {"role": "tool", "name": "error", "tool_call_id": "error", "content": "error: not JSON"},
    ]
    assert tool_messages(Action("x", errors=action.errors)) == [{"role": "user", "content": "error: not JSON"}]
    assert tool_messages(Action("x")) == []


async def test_a_tool_env_ends_at_an_answer_or_a_turn_without_calls():
    env = ToolEnv()
    assert (await settled(env.step(Action("x", answer="y", results=(ToolResult("c", "t", "z"),))))).terminated
    assert (await settled(env.step(Action("just talk")))).terminated
    assert not (await settled(env.step(Action("x", results=(ToolResult("c", "t", "z"),))))).terminated
    assert not (await settled(env.step(Action("x", errors=(ParseError("content", "bad"),))))).terminated


def test_environments_by_name_module_and_file(tmp_path):
    register_env("shelf_for_tests")(Shelf)
    assert make_env_class("shelf_for_tests") is Shelf
    file = tmp_path / "mine.py"
    file.write_text("from agentrl import Env, ToolEnv\nclass Mine(ToolEnv):\n    pass\n")
    assert make_env_class(str(file)).__name__ == "Mine"
    assert make_env_class(f"{file}:Mine") is make_env_class(str(file))
    with pytest.raises(UnknownNameError, match="did you mean"):
        make_env_class("shelf_for_test")
    with pytest.raises(ContractError, match=r"expected a subclass of agentrl\.Env"):
        make_env_class("agentrl.types:Task")


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"timeout_s": "5"}, {"threads": 0}, {"threads": 2.0}], ids=repr)
def test_a_bad_limit_is_refused_where_it_is_declared(limits):
    with pytest.raises(ContractError, match=f"environment Bad: {next(iter(limits))} must be"):
        type("Bad", (Env,), limits)
