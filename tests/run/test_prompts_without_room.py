"""What `agentrl rollout` says about prompts before the first episode: those without room are left out, with the environment's tools counted."""

import json

import pytest

from agentrl.cli.main import main
from agentrl.run.rollouts import EpisodeRun
from agentrl.store import read_episodes

ENV = """
from agentrl import ToolEnv, reward, tool

@reward
def zero(trajectory): return 0.0

class Desk(ToolEnv):
    rewards = [zero]
    shows_tools = True

    @tool
    def open(self, name: str) -> str:
        '''Open an application. LONG'''
        return name
"""
FEW_SHOT = """
from agentrl import ToolEnv, reward

@reward
def zero(trajectory): return 0.0

class Shown(ToolEnv):
    rewards = [zero]

    def reset(self, task, *, seed):
        call = {"type": "function", "id": "abcdefgh0", "function": {"name": "search", "arguments": {"query": "x"}}}
        result = {"role": "tool", "name": "search", "tool_call_id": "abcdefgh0", "content": "found"}
        return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}, result, *task.messages]
"""


@pytest.fixture
def start(model, says, tmp_path):
    """Start a rollout of an environment on two prompts."""
    says(lambda asked: "done")

    def command(code, *more):
        (tmp_path / "desk.py").write_text(code)
        (tmp_path / "d.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("q", "q " * 300)))
        words = [
            "rollout",
            "--env",
            "desk.py",
            "--model",
            model,
            "--prompt-data",
            "d.jsonl",
            "--run",
            "run",
            "--num-rollout",
            "1",
        ]
        return main([*words, "--rollout-batch-size", "1", "--n-samples-per-prompt", "2", *more])

    return command


def test_prompts_without_room_are_named_before_the_first_episode(start, tmp_path, monkeypatch, capsys):
    printed = []
    play = EpisodeRun.rollout

    async def first_look(self, step):
        printed.append(capsys.readouterr().out)
        return await play(self, step)

    monkeypatch.setattr(EpisodeRun, "rollout", first_look)
    assert start(ENV, "--rollout-max-context-len", "500", "--action-format", "hermes") == 0
    assert "1 of 2 prompts take at least the 500 tokens of the context: they are left out (" in printed[0]
    assert "d.jsonl, line 2: " in printed[0]
    assert {t.task.prompt for t in read_episodes(tmp_path / "run/episodes")} == {"q"}


def test_the_environments_tools_count_in_a_prompts_length(start, capsys):
    long = ENV.replace("LONG", "x " * 600)
    assert start(long, "--rollout-max-context-len", "500", "--action-format", "hermes") == 2
    assert "2 of 2 prompts take at least the 500 tokens" in capsys.readouterr().err


def test_a_first_observation_with_a_call_that_the_template_drops_ends_the_run(start, capsys):
    assert start(FEW_SHOT, "--action-format", "hermes") == 2
    assert "Shown.reset: " in (err := capsys.readouterr().err)
    assert "leaves the call of 'search' in message 1 out of the prompt" in err
