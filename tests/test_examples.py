"""The examples in the docstrings of the public API run, and the episode in them equals what a run records."""

import ast
import doctest
import inspect
import textwrap

import docstring_parser
import pytest
from doubles import EMBEDDED, play

import agentrl
from agentrl import (
    Env,
    Observation,
    Sample,
    Task,
    Tool,
    ToolEnv,
    Trajectory,
    env,
    errors,
    register_env,
    reward,
    tool,
    types,
)
from agentrl.render import Tokenizer, make_renderer
from agentrl.train.sample import to_samples

MODULES = [types, errors, env, inspect.getmodule(tool), inspect.getmodule(reward)]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_the_examples_run(module):
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert outcome.attempted
    assert not outcome.failed


@pytest.mark.parametrize("name", sorted({*agentrl.__all__} - {"AgentRLError", "Reward"}))
def test_every_public_name_has_an_example(name):
    assert "Example" in getattr(agentrl, name).__doc__


METHODS = [Env.reset, Env.step, Env.tasks, Env.check_task, Tool.setup, Observation.of, register_env, reward, tool]


@pytest.mark.parametrize("function", METHODS, ids=lambda f: f.__qualname__)
def test_every_argument_of_the_public_api_is_documented(function):
    documented = {p.arg_name.lstrip("*") for p in docstring_parser.parse(inspect.getdoc(function)).params}
    assert documented == inspect.signature(function).parameters.keys() - {"self"}


def documented_trajectory():
    """The objects of the docstring's example."""
    (example,) = doctest.DocTestFinder(recurse=False).find(Trajectory, "Trajectory", globs=dict(vars(types)))
    assert not doctest.DocTestRunner().run(example, clear_globs=False).failed
    return example.globs["trajectory"]


def documented_sample():
    """The keyword arguments of the call in the docstring of `Sample`."""
    text = textwrap.dedent(inspect.getdoc(Sample).partition("rounded):")[2])
    call = ast.parse(text.strip(), mode="eval").body
    return {k.arg: k.value for k in call.keywords}


@reward
def correct(trajectory):
    return float(trajectory.answer == trajectory.label)


class Quiz(ToolEnv):
    action_format = "search_r1"
    rewards = (correct,)

    @tool
    def search(self, query: str) -> str:
        """Search."""
        return "Bern"


async def test_the_two_turn_example_is_what_an_episode_records():
    renderer = make_renderer(Tokenizer.load(EMBEDDED), "search_r1")
    script = ["<search>Swiss capital</search>", "<answer>Bern</answer>"]
    task = Task("swiss", "Swiss capital?", "Bern")
    played, documented = await play(Quiz, script, renderer, task=task, rewards=Quiz.rewards), documented_trajectory()
    spans = [[(s.provenance, s.ids, s.turn) for s in t.segments[0].spans] for t in (played, documented)]
    assert spans[0] == spans[1]
    for name in ("task", "env", "stop_reason", "rewards", "weights", "score", "answer"):
        assert getattr(played, name) == getattr(documented, name)
    for a, b in zip(played.turns, documented.turns, strict=True):
        assert (a.context_length, a.observation, a.action.calls, a.action.answer) == (
            b.context_length,
            b.observation,
            b.action.calls,
            b.action.answer,
        )


def test_the_example_of_a_sample_is_the_episodes_sample():
    (sample,) = to_samples(documented_trajectory())
    for name, value in documented_sample().items():
        if name != "status":
            assert getattr(sample, name) == ast.literal_eval(value), name
    assert sample.status.name == documented_sample()["status"].attr
