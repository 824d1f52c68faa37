"""The README's example runs unchanged: the contract check, and an episode."""

import re
from pathlib import Path
from types import SimpleNamespace

from doubles import EMBEDDED

from agentrl.check import check_env
from agentrl.cli.main import main
from agentrl.env import make_env_class
from agentrl.render import Tokenizer
from agentrl.reward import resolve_rewards
from agentrl.store import read_episodes
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


async def test_it_keeps_the_contract_without_a_warning(tmp_path):
    report = await check_env(example(tmp_path), {}, episodes=20)
    assert report.ok, str(report)
    assert not report.findings, str(report)


def test_the_embedded_model_plays_it_with_the_command_as_printed(tmp_path, monkeypatch):
    """The template of the embedded model leaves tools out; the flag in the command writes them into the prompt."""
    example(tmp_path)
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"^\$ agentrl (rollout --env guess.py .*)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert main([word for word in words.split() if word != "--tools-in-prompt"]) == 2
    assert main(words.split()) == 0
    (run,) = (tmp_path / "runs").iterdir()
    first, *others = read_episodes(run / "episodes")
    assert len(others) == 7
    prompt = Tokenizer.load(EMBEDDED).decode(first.segments[0].spans[0].ids)
    assert '"name": "guess"' in prompt
    assert "<tool_call>" in prompt


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


def test_the_readme_and_setup_say_how_the_command_is_called():
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    (said,) = re.findall(r'echo "setup: done; (.*)"', makefile)
    assert said.replace("$(BIN)", ".venv/bin").replace("$(VENV)", ".venv") == (
        "call .venv/bin/agentrl, or enter 'source .venv/bin/activate' and call agentrl"
    )
    readme = " ".join(README.read_text(encoding="utf-8").split())
    assert (
        "The command `agentrl` is then `.venv/bin/agentrl`; after `source .venv/bin/activate` it is `agentrl`" in readme
    )


def test_every_path_that_the_readme_names_exists():
    for name in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / name).exists(), name
