"""A task with tools that the policy cannot see or call is refused; one with tools that it sees is counted."""

import json
import shutil

import pytest

from agentrl import ToolEnv
from agentrl.config import build_config
from agentrl.data.task_sets import TaskSets
from agentrl.errors import DataError
from agentrl.render import Tokenizer, make_renderer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def hidden(tokenizer_dir, tmp_path):
    """A renderer whose chat template omits tools."""
    folder = shutil.copytree(tokenizer_dir, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return make_renderer(Tokenizer.load(folder), "hermes")


def load(renderer, tmp_path, tools, env=ToolEnv):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": "q", "label": "a", "tools": tools}))
    sets = TaskSets(build_config({"prompt_data": str(file)}), env, renderer)
    return sets.training(), sets.counts


def test_tools_that_the_template_shows_are_taken_and_counted(hermes, tmp_path):
    (task,), (line,) = load(hermes, tmp_path, [WEATHER])
    assert task.metadata["tools"][0]["function"]["name"] == "weather"
    assert "1 with tools of their own, which the policy sees beside the environment's" in line


@pytest.mark.parametrize(
    ("tools", "form", "what"),
    [
        ([WEATHER], "search_r1", "calls only its own tags"),
        ([WEATHER, WEATHER], "hermes", "two tools of the same name"),
        ([{**WEATHER, "function": {"name": "not a name"}}], "hermes", "1 to 64 letters"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_with_their_row(hermes, tmp_path, tools, form, what):
    with pytest.raises(DataError, match=what) as e:
        load(make_renderer(hermes.tokenizer, form), tmp_path, tools)
    assert "tasks.jsonl, line 1" in str(e.value)


def test_tools_that_the_template_omits_are_refused_unless_the_prompt_shows_them(hidden, tmp_path):
    with pytest.raises(DataError, match="omits tools"):
        load(hidden, tmp_path, [WEATHER])

    class Described(ToolEnv):
        shows_tools = True

    assert load(hidden, tmp_path, [WEATHER], Described)[0]
