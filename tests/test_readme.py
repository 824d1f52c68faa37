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


def test_the_embedded_model_plays_it_as_the_readme_says(tmp_path, monkeypatch):
    """The template of the embedded model leaves tools out; the flag that the README names writes them into the prompt."""
    example(tmp_path)
    monkeypatch.chdir(tmp_path)
    small = ["--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--max-turns", "1"]
    short = ["--rollout-max-response-len", "8", "--tensorboard", "false", "--run", "run"]
    words = ["rollout", "--env", "guess.py", "--model", "search_r1_3m", *small, *short]
    assert main(words) == 2
    assert main([*words, "--tools-in-prompt"]) == 0
    (first, _) = read_episodes(tmp_path / "run/episodes")
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


def test_every_path_that_the_readme_names_exists():
    for name in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / name).exists(), name
