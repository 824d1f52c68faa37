"""The README's example runs unchanged: the contract check, and an episode."""

import re
from pathlib import Path
from types import SimpleNamespace

from agentrl.check import check_env
from agentrl.env import make_env_class
from agentrl.reward import resolve_rewards
from agentrl.types import Action, Task, ToolCall, ToolResult

README = Path(__file__).parent.parent / "README.md"


def example(tmp_path):
    """The first Python block, as a file."""
    source, _ = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "guess.py"
    file.write_text(source)
    return make_env_class(str(file))


def test_it_is_short(tmp_path):
    env = example(tmp_path)
    body = Path(__import__("sys").modules[env.__module__].__file__).read_text()
    assert sum(bool(line.strip()) for line in body.splitlines()) <= 25


async def test_it_keeps_the_contract(tmp_path):
    report = await check_env(example(tmp_path), {}, episodes=4)
    assert report.ok, str(report)


def test_it_can_be_won(tmp_path):
    env = example(tmp_path)()
    env.reset(Task("7", "I think of a number.", 7), seed=0)
    for number, said in ((3, "higher"), (9, "lower"), (7, "right")):
        call = ToolCall("guess", {"number": number}, "c")
        assert env.guess(**call.arguments) == said
        result = env.step(Action("x", calls=(call,), results=(ToolResult("c", "guess", said),)))
        assert result.terminated is (said == "right")
    assert env.state() == {"found": True}


def test_its_reward_is_found_without_a_name(tmp_path):
    _, source = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "scores.py").write_text(source)
    (found,) = resolve_rewards([str(tmp_path / "scores.py")])
    turn = SimpleNamespace(action=Action(" Paris\n"))
    assert [found(SimpleNamespace(turns=[turn], label=label)) for label in ("Paris", "Rome")] == [1.0, 0.0]


def test_every_path_that_the_readme_names_exists():
    for name in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / name).exists(), name
