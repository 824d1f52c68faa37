"""`agentrl check` reports what violates an environment's contract, and nothing for one that keeps it."""

import asyncio
import itertools
import random
import subprocess
import sys
import threading
import time
from typing import Annotated, Any, Literal

import pytest
from doubles import PARIS
from pydantic import BaseModel, Field

from agentrl import Env, InfraError, StepResult, Task, ToolEnv, reward, tool
from agentrl.check import Report, Severity, check_env
from agentrl.check.scripted_policies import argument, make_tiny_renderer
from agentrl.errors import ConfigError, DataError
from agentrl.reward import Reward


@reward(name="says_label_for_tests")
def says_label(trajectory):
    return float(trajectory.answer == trajectory.label)


TASKS = [Task(f"t{i}", f"What is {i} plus one?", str(i + 1)) for i in range(4)]


class Good(ToolEnv):
    """Keeps its contract."""

    rewards = (says_label,)

    @classmethod
    def tasks(cls, split):
        return [Task(f"{split}-{t.id}", t.prompt, t.label) for t in TASKS]

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add.

        Args:
            a: the first
            b: the second
        """
        return a + b

    async def close(self):
        pass


class GoodSync(Env):
    """Keeps it, with sync methods and a separate random generator."""

    rewards = (says_label,)

    def __init__(self, size: int = 10):
        self.size = size

    @classmethod
    def tasks(cls, split):
        return Good.tasks(split)

    def reset(self, task, *, seed, group_seed):
        self.random = random.Random(seed)
        self.label = task.label
        return f"{task.prompt} A hint: {random.Random(group_seed).randint(0, self.size)}"

    def step(self, action):
        done = action.answer == self.label
        return StepResult(f"try again {self.random.random()}", 0.1, terminated=done, state_key="x", info={"n": 1})

    def state(self):
        return {"label": self.label}


async def check(env, **more):
    return await check_env(env, **{"episodes": 10, **more})


def findings_of(report: Report, severity=None):
    return {(f.where, f.what) for f in report.findings if severity is None or f.severity is severity}


def reports(report, where, text, severity=Severity.ERROR):
    return any(where == f.where and text in f.what and f.severity is severity for f in report.findings)


@pytest.mark.parametrize("env", [Good, GoodSync])
async def test_a_good_environment_has_no_findings(env):
    report = await check(env)
    assert findings_of(report) == set()
    assert report.ok
    assert report.episodes == 20
    assert report.turns > 20
    assert (min(report.scores), max(report.scores)) != (0, 0)
    assert str(report).splitlines()[-1] == "ok: no findings"


async def test_an_environment_in_search_r1s_format():
    class Tags(ToolEnv):
        action_format = "search_r1"
        rewards = (says_label,)

        @classmethod
        def tasks(cls, split):
            return Good.tasks(split)

        @tool
        def search(self, query: str) -> str:
            """Search.

            Args:
                query: what for
            """
            return f"about {query}"

    report = await check(Tags)
    assert findings_of(report) == set()


async def test_the_same_check_twice_finds_the_same():
    a, b = await check(Good, seed=5), await check(Good, seed=5)
    assert (a.turns, a.scores, a.reasons) == (b.turns, b.scores, b.reasons)


async def test_arguments_and_tasks_are_passed_on():
    seen = []

    class Sized(GoodSync):
        def reset(self, task, *, seed):
            seen.append((self.size, task.id))
            return super().reset(task, seed=seed)

    await check(Sized, args={"size": 3}, tasks=[PARIS], episodes=2)
    assert set(seen) == {(3, "paris")}


# -- what is broken --------------------------------------------------------------------------------------------------


def broken(**body: Any):
    """GoodSync with some of its methods replaced."""
    return type("Broken", (GoodSync,), body)


def step_of(make):
    return {"step": lambda self, action: make(self, action)}


_counter = itertools.count()


class Shared(GoodSync):
    seen = []

    def step(self, action):
        Shared.seen.append(action)
        return StepResult(f"{len(Shared.seen)} so far", terminated=action.answer is not None)


def _raises_on_errors(self, action):
    if action.errors:
        raise KeyError("query")
    return StepResult("x", terminated=action.answer is not None)


BROKEN = {
    "step returns text": (step_of(lambda s, a: "text"), "contract", "must return a StepResult"),
    "step returns None": (step_of(lambda s, a: None), "contract", "must return a StepResult"),
    "empty observation": (step_of(lambda s, a: StepResult()), "contract", "returned no observation and did not end the episode"),
    "reward is NaN": (step_of(lambda s, a: StepResult("x", float("nan"))), "contract", "finite number"),
    "reward is text": (step_of(lambda s, a: StepResult("x", "1")), "contract", "finite number"),
    "info is no mapping": (step_of(lambda s, a: StepResult("x", info=5)), "contract", "info must be a mapping"),
    "observation is a number": (step_of(lambda s, a: StepResult(5)), "contract", "an observation must be"),
    "reset returns nothing": ({"reset": lambda self, task, *, seed: None}, "contract", "an observation must be"),
    "reset returns emptiness": ({"reset": lambda self, task, *, seed: []}, "contract", "empty observation"),
    "terminated is text": (step_of(lambda s, a: StepResult("x", terminated="yes")), "step", "terminated must be a bool, found str"),
    "state_key is a number": (step_of(lambda s, a: StepResult("x", state_key=5)), "step", "state_key must be a str"),
    "step raises": (step_of(lambda s, a: 1 / 0), "step", "ZeroDivisionError"),
    "step raises after errors": ({"step": _raises_on_errors}, "step", "KeyError: 'query' on an action that cannot be parsed"),
    "reset raises": ({"reset": lambda self, task, *, seed: {}["x"]}, "reset", "KeyError"),
    "reset takes no seed": ({"reset": lambda self, task: "x"}, "reset", "TypeError"),
    "close raises": ({"close": lambda self: 1 / 0}, "close", "ZeroDivisionError"),
    "state is no dict": ({"state": lambda self: [1]}, "state", "must return a dict"),
    "constructor raises": ({"__init__": lambda self: 1 / 0}, "constructor", "ZeroDivisionError"),
    "global randomness": (step_of(lambda s, a: StepResult(str(random.random()), terminated=a.answer is not None)), "determinism", "observation"),
    "counter in reset": ({"reset": lambda self, task, *, seed: f"episode {next(_counter)}"}, "determinism", "the first observation"),
    "state shared by instances": (dict(vars(Shared)), "determinism", "observation"),
    "reward raises": ({"rewards": (Reward(lambda t: 1 / 0, "bad"),)}, "rewards", "reward bad: ZeroDivisionError"),
    "reward returns text": ({"rewards": (Reward(lambda t: "1", "bad"),)}, "rewards", "reward bad: not a number"),
    "group reward too short": ({"rewards": (Reward(lambda ts: [1.0], "bad", group=True),)}, "rewards", "1 values for 2 trajectories"),
    "unknown reward": ({"rewards": ("no_such_reward",)}, "rewards", "unknown reward"),
    "no step": ({"step": Env.step}, "failures", "must define step"),
    "leaves the process": (step_of(lambda s, a: sys.exit(0)), "failures", "SystemExit"),
    "tasks raise": ({"tasks": classmethod(lambda cls, split: {}[split])}, "tasks", "KeyError"),
    "tasks are dicts": ({"tasks": classmethod(lambda cls, split: [{"id": 1}])}, "tasks", "yields dict, not agentrl.Task"),
    "tool without schema": ({"bad": tool(lambda self, *args: "x")}, "tools", "name must be"),
    "refuses its own tasks": ({"check_task": classmethod(lambda cls, task: _refuse())}, "check_task", "refuses task"),
}  # fmt: skip


def _refuse():
    raise DataError("no")


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_violation_of_the_contract_is_an_error(kind):
    body, where, text = BROKEN[kind]
    report = await check(broken(**{k: v for k, v in body.items() if k not in ("__dict__", "__weakref__")}))
    assert reports(report, where, text), str(report)
    assert not report.ok
    assert str(report).splitlines()[-1].startswith("not ok: ")


def _down_on_errors(self, action):
    if action.errors:
        raise InfraError("index down")
    return GoodSync.step(self, action)


WARNED = {
    "state is no JSON": ({"state": lambda self: {"x": object()}}, "state", "is not JSON"),
    "info is no JSON": (step_of(lambda s, a: StepResult("x", info={"x": object()}, terminated=a.answer is not None)), "step", "info is not JSON"),
    "empty tasks": ({"tasks": classmethod(lambda cls, split: [])}, "tasks", "tasks('train') is empty"),
    "an id twice": ({"tasks": classmethod(lambda cls, split: TASKS)}, "tasks", "ids occur twice"),
    "no labels": ({"tasks": classmethod(lambda cls, split: [Task(split, "q")])}, "tasks", "no task has a label"),
    "equal scores": ({"rewards": (Reward(lambda t: 0.0, "z"),), "step": lambda self, a: StepResult("x")}, "rewards", "every episode scored 0"),
    "infrastructure": ({"step": _down_on_errors}, "step", "InfraError: index down"),
    "tool without docstring": ({"silent": tool(name="silent")(lambda self: "x")}, "tool silent", "no description"),
    "tool that raises": ({"odd": tool(name="odd")(lambda self: {}["x"])}, "tool odd", "failed on arguments that fit"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WARNED)
async def test_a_likely_mistake_is_a_warning(kind):
    body, where, text = WARNED[kind]
    report = await check(broken(**body))
    assert reports(report, where, text, Severity.WARNING), str(report)
    assert report.ok, str(report)


@pytest.mark.parametrize("where", ["reset", "step", "a tool"])
async def test_a_check_whose_episodes_all_failed_is_never_ok(where):
    def down(self, *args, **kwargs):
        raise InfraError("index down")

    @tool
    def look(self) -> str:
        """Look."""
        raise InfraError("index down")

    if where == "a tool":
        report = await check(type("Broken", (GoodSync,), {"look": look, "step": down}))
    else:
        report = await check(broken(**{where: down}))
    assert report.scores == []
    assert reports(report, "episodes", "all 20 episodes failed"), str(report)
    assert not report.ok


async def test_close_called_by_the_environment_itself():
    class ClosesItself(GoodSync):
        def step(self, action):
            self.close()
            return StepResult("x", terminated=True)

        def close(self):
            pass

    assert reports(await check(ClosesItself), "close", "more than once", Severity.WARNING)


async def test_close_that_needs_a_reset():
    class Needs(GoodSync):
        def close(self):
            self.random.random()

    assert reports(await check(Needs), "close", "AttributeError without a preceding reset", Severity.WARNING)


async def test_a_tool_parameter_without_a_type_or_description():
    class Loose(Good):
        @tool
        def loose(self, x, y: int) -> str:
            """Take anything."""
            return "x"

    report = await check(Loose)
    assert reports(report, "tool loose", "'x' accepts any value", Severity.WARNING)
    assert reports(report, "tool loose", "'y' has no description", Severity.NOTE)


async def test_an_environment_without_tasks_or_rewards_is_checked_with_generated_tasks():
    class Bare(ToolEnv):
        pass

    report = await check(Bare)
    assert reports(report, "tasks", "has no tasks; give some with --prompt-data", Severity.NOTE)
    assert reports(report, "rewards", "names no rewards", Severity.NOTE)
    assert report.episodes == 20
    assert report.ok


async def test_a_class_without_its_arguments_is_an_error():
    class Needs(Good):
        def __init__(self, corpus):
            pass

    report = await check(Needs)
    assert reports(report, "constructor", "corpus")
    assert report.episodes == 0


# -- time ------------------------------------------------------------------------------------------------------------


async def test_blocking_the_event_loop_is_an_error_and_a_thread_a_warning(monkeypatch):
    monkeypatch.setattr("agentrl.check.instrumented_env.SLOW_S", 0.05)

    class SlowSync(GoodSync):
        def reset(self, task, *, seed):
            time.sleep(0.1)
            return super().reset(task, seed=seed)

    class SlowAsync(Good):
        async def step(self, action):
            time.sleep(0.1)  # noqa: ASYNC251
            return StepResult("x", terminated=True)

    class Waiting(Good):
        async def step(self, action):
            await asyncio.sleep(0.1)
            return StepResult("x", terminated=True)

    assert reports(await check(SlowSync, episodes=2), "reset", "blocked a thread", Severity.WARNING)
    assert reports(await check(SlowAsync, episodes=2), "step", "blocked the event loop")
    assert not [f for f in (await check(Waiting, episodes=2)).findings if "blocked" in f.what]


@pytest.mark.parametrize("name", ["reset", "step", "close"])
async def test_a_method_that_never_returns_is_an_error_and_the_check_ends(monkeypatch, name):
    monkeypatch.setattr("agentrl.check.instrumented_env.TIMEOUT_S", 0.1)
    monkeypatch.setattr("agentrl.check.env_check.TIMEOUT_S", 0.1)
    gate = threading.Event()

    def hangs(self, *args, **kwargs):
        gate.wait(20)

    report = await check(broken(**{name: hangs}), episodes=2)
    gate.set()
    assert reports(report, "time", f"env {name}: timeout"), str(report)


# -- pieces ----------------------------------------------------------------------------------------------------------


class Point(BaseModel):
    x: int
    tags: list[str] = Field(min_length=1)


def test_arguments_of_the_policies_fit_the_schema():
    from agentrl.tool import spec_of

    @tool
    def many(
        a: str,
        b: int,
        c: float,
        d: bool,
        e: list[int],
        f: Literal["x", "y"],
        g: Point,
        h: dict[str, Any],
        i: int | None,
        j: Annotated[int, Field(ge=3, le=4)],
        k: None,
    ) -> str:
        """Take all kinds."""
        return ""

    spec = spec_of(many)
    for seed in range(50):
        drawn = random.Random(seed)
        given = {
            n: argument(s, spec.parameters.get("$defs", {}), PARIS, drawn)
            for n, s in spec.parameters["properties"].items()
        }
        spec.arguments(given)


def test_the_tiny_tokenizer_is_exact():
    renderer = make_tiny_renderer(None)
    for text in ("plain", "東京 🙂", "<|im_end|>", "\x00"):
        assert renderer.tokenizer.decode(renderer.tokenizer.encode_plain(text)) == text


async def test_the_table():
    report = await check(broken(**step_of(lambda s, a: 1 / 0)))
    lines = str(report).splitlines()
    assert lines[0].startswith("Broken: 20 episodes, 20 turns")
    assert lines[0].endswith("ended by 20 env_failure")
    assert lines[1].startswith("error    step  raised ZeroDivisionError")
    assert "test_check.py:" in lines[1]
    assert lines[2].strip().startswith("-> ")


def test_a_check_imports_no_torch():
    code = "import sys, agentrl.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_an_environment_without_tasks_differs_from_broken_tasks():
    class Later(Good):
        @classmethod
        def tasks(cls, split):
            raise ConfigError("environment later has no tasks")

    assert (await check(Later)).ok


async def test_several_calls_in_one_turn_are_played():
    class OneCall(Good):
        async def step(self, action):
            if len(action.calls) > 1:
                raise IndexError("one call expected")
            return await super().step(action)

    assert reports(await check(OneCall), "step", "raised IndexError: one call expected on a tool call")


async def test_many_tools_leave_room_for_the_answer():
    def numbered(i):
        def look() -> str:
            """Look."""
            return str(i)

        return tool(name=f"look_{i}")(look)

    class Many(Good):
        tools = [numbered(i) for i in range(9)]

    assert max((await check(Many)).scores) == 1.0


def _board(seeds):
    def reset(self, task, *, seed, group_seed):
        self.random = random.Random(seed)
        self.label = task.label
        return f"{task.prompt} Board {seeds(seed, group_seed)}"

    return reset


async def test_first_observations_that_differ_in_a_group_are_a_warning():
    report = await check(broken(reset=_board(lambda seed, group_seed: seed)))
    assert reports(report, "reset", "the first observations of one group differ", Severity.WARNING), str(report)
    assert "group_seed" in str(report)
    assert len(findings_of(report)) == 1
    assert not findings_of(await check(broken(reset=_board(lambda seed, group_seed: group_seed))))


async def test_the_warning_is_not_given_where_nothing_is_deterministic():
    report = await check(broken(reset=_board(lambda seed, group_seed: next(_counter))))
    assert reports(report, "determinism", "the first observation")
    assert not reports(report, "reset", "differ", Severity.WARNING)
