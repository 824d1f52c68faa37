"""Tools of a task's own, tasks that see the environment's arguments, and action formats of one's own."""

from __future__ import annotations

import asyncio
import json

import pytest
from doubles import call, make_runner, play

from agentrl import Env, StepResult, Task, ToolEnv, ToolSpec, tool
from agentrl.check import check_env
from agentrl.env import task_tools, tasks_of
from agentrl.errors import ContractError
from agentrl.render import FORMATS, TagFormat, make_renderer, register_format
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.types import EpisodeSpec, StopReason

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}


class Desk(ToolEnv):
    """Has the tools that a task names, and one of its own."""

    def tool_specs(self, task):
        names = task.metadata.get("names", ()) if task else ()
        own = [ToolSpec(n, f"Open {n}.", CITY, lambda city, n=n: f"{n} of {city}") for n in names]
        return [*super().tool_specs(task), *own]

    @tool
    def look(self, city: str) -> str:
        """Look."""
        return f"looked at {city}"


class TestToolsOfATask:
    def test_an_override_with_a_parameter_task_receives_it(self):
        assert [s.name for s in task_tools(Desk(), Task("0", "", metadata={"names": ["map"]}))] == ["look", "map"]
        assert [s.name for s in task_tools(Desk(), None)] == ["look"]

    def test_tools_of_the_column_are_added_unless_the_environment_has_them(self):
        both = {"tools": [WEATHER, {**WEATHER, "function": {**WEATHER["function"], "name": "look"}}]}
        specs = {s.name: s for s in task_tools(Desk(), Task("0", "", metadata=both))}
        assert list(specs) == ["look", "weather"]
        assert specs["weather"].fn is None
        assert specs["look"].fn is not None

    @pytest.mark.parametrize("names", [["look"], ["map", "map"]])
    def test_two_tools_of_one_name_are_refused(self, names):
        with pytest.raises(ContractError, match="two tools of the same name"):
            task_tools(Desk(), Task("0", "", metadata={"names": names}))

    async def test_the_policy_calls_the_tools_of_its_task(self, hermes):
        script = [call("map", city="Bern"), "done"]
        played = await play(Desk, script, hermes, task=Task("0", "Go.", metadata={"names": ["map"]}))
        assert [r.content for r in played.turns[0].action.results] == ["map of Bern"]
        other = await play(Desk, script, hermes, task=Task("1", "Go."))
        assert other.turns[0].action.results[0].content.startswith("error: unknown tool 'map'")

    async def test_a_call_of_a_tool_without_a_function_is_the_answer(self, hermes):
        task = Task("0", "Go.", metadata={"tools": [WEATHER]})
        played = await play(ToolEnv, [call("weather", city="Bern")], hermes, task=task)
        assert (played.stop_reason, len(played.turns)) == (StopReason.TERMINATED, 1)
        assert played.turns[0].action.calls[0].arguments == {"city": "Bern"}
        assert played.turns[0].action.results == ()

    @pytest.mark.parametrize(
        ("schema", "given", "problem"),
        [
            (CITY, {}, "city: Field required"),
            ({**CITY, "additionalProperties": False}, {"city": "a", "x": 1}, "x: Extra"),
        ],
    )
    def test_names_of_arguments_are_checked_against_a_schema(self, schema, given, problem):
        with pytest.raises(ValueError, match=problem):
            ToolSpec("weather", "", schema, print).arguments(given)

    def test_a_bad_name_is_refused(self):
        with pytest.raises(ContractError, match="1 to 64 letters"):
            ToolSpec("not a name", "", CITY)


class TestTasksSeeTheArguments:
    def env(self, body):
        class Sized(ToolEnv):
            def __init__(self, size: int = 3, other: str = ""):
                self.size = size

            tasks = classmethod(body)

        return Sized

    def test_a_parameter_receives_the_argument_of_its_name_or_the_constructors_default(self):
        env = self.env(lambda cls, split, size: [Task(str(n), "") for n in range(size)])
        assert len(list(tasks_of(env, "train", {"size": 5}))) == 5
        assert len(list(tasks_of(env, "train", {}))) == 3

    def test_its_own_default_comes_before_the_constructors(self):
        env = self.env(lambda cls, split, size=1: [Task(str(n), "") for n in range(size)])
        assert len(list(tasks_of(env, "train", {}))) == 1
        assert len(list(tasks_of(env, "train", {"size": 2, "other": "x"}))) == 2

    def test_keywords_receive_all_arguments(self):
        env = self.env(lambda cls, split, **args: [Task(json.dumps(args), "")])
        assert next(iter(tasks_of(env, "train", {"size": 2, "other": "x"}))).id == '{"size": 2, "other": "x"}'

    async def test_the_check_plays_the_tasks_of_the_arguments(self):
        env = self.env(lambda cls, split, size: [Task(f"{split}-{n}", "x", str(n)) for n in range(size)] or 1 / 0)
        report = await check_env(env, {"size": 0}, episodes=2)
        assert any("ZeroDivisionError" in f.what for f in report.findings)
        assert not any("tasks" in f.where for f in (await check_env(env, {"size": 2}, episodes=2)).findings)


class TestFormatsOfOnesOwn:
    async def test_an_environment_may_bring_its_tags(self, hermes):
        class Retool(ToolEnv):
            action_format = TagFormat("retool_class", calls={"code": ("python", "code")}, result_tag="interpreter")

            @tool
            def python(self, code: str) -> str:
                """Run."""
                return f"ran {code}"

            @classmethod
            def tasks(cls, split):
                return [Task(f"{split}-0", "Run.", "1")]

        renderer = make_renderer(hermes.tokenizer, Retool.action_format)
        played = await play(Retool, ["<code>1+1</code>", "<answer>2</answer>"], renderer)
        assert played.answer == "2"
        assert "<interpreter>ran 1+1</interpreter>" in renderer.tokenizer.decode(played.segments[0].ids)
        assert not [f for f in (await check_env(Retool, episodes=4)).findings if f.severity.value == "error"]

    def test_a_registered_format_has_a_name_and_keeps_it(self):
        form = TagFormat("tags_for_tests", calls={"calc": ("calc", "expression")})
        register_format(form)
        register_format(TagFormat("tags_for_tests", calls={"calc": ("calc", "expression")}))
        assert FORMATS["tags_for_tests"] == form
        with pytest.raises(ContractError, match="another action format"):
            register_format(TagFormat("tags_for_tests"))
        del FORMATS["tags_for_tests"]


async def test_no_more_episodes_of_an_environment_run_than_it_allows(hermes):
    running, most = 0, 0

    class Narrow(Env):
        async def step(self, action):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return StepResult(terminated=True)

    runner = make_runner(Narrow, ["x"], hermes)
    specs = [[EpisodeSpec(Task(str(i), "Go."), i, i)] for i in range(8)]
    groups, _ = await Rollout(runner, RolloutLimits(concurrency=8), {"": 2}).run(specs)
    assert (len(groups), most) == (8, 2)


def test_a_limit_that_is_none_is_refused():
    with pytest.raises(ContractError, match="max_concurrency must be an integer"):
        type("Wide", (Env,), {"max_concurrency": 0})
