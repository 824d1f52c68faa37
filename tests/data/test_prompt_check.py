"""Before a run: prompts that the template would cut are refused by line; prompts without room in the context are counted and named."""

import json

import pytest

from agentrl import Env, Task, ToolEnv
from agentrl.config import build_config
from agentrl.data.task_sets import TaskSets
from agentrl.errors import DataError

CALL = {"type": "function", "id": "abcdefgh0", "function": {"name": "search", "arguments": {"query": "x"}}}
FEW_SHOT = [
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "search", "tool_call_id": "abcdefgh0", "content": "found"},
    {"role": "user", "content": "And?"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 300, "parameters": {"type": "object"}}}


class Own(ToolEnv):
    """Makes its own first observation."""

    def reset(self, task, *, seed):
        return "short"


class Long(Env):
    """Has tasks of its own, the second of them long."""

    system_prompt = "Be short."

    @classmethod
    def tasks(cls, split):
        return [Task("a", "q"), Task("b", "q " * 400)]


def sets(renderer, tmp_path, prompts, env=ToolEnv, length=256, **settings):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "label": "a"}) + "\n" for p in prompts))
    made = TaskSets(build_config({"prompt_data": str(file), **settings}), env, renderer)
    made.prompts.context_length = length
    return made, str(file)


def test_a_few_shot_call_that_the_template_leaves_out_is_refused_by_line(hermes, tmp_path):
    made, _ = sets(hermes, tmp_path, ["q", FEW_SHOT])
    with pytest.raises(DataError, match=r"line 2: .*leaves the call of 'search' in message 1 out of the prompt"):
        made.training()


def test_reasoning_of_earlier_turns_is_counted(hermes, tmp_path):
    thought = {"role": "assistant", "content": "a", "reasoning_content": "so"}
    made, _ = sets(hermes, tmp_path, ["q", [FEW_SHOT[0], thought, FEW_SHOT[0]]])
    assert len(made.training()) == 2
    assert "1 with reasoning of earlier turns, which the chat template leaves out of the prompt" in made.counts[0]


def test_prompts_without_room_are_left_out_counted_and_named_before_training(hermes, tmp_path):
    long = "q " * 200
    made, file = sets(hermes, tmp_path, ["q", long, "r", long])
    assert [t.prompt for t in made.training()] == ["q", "r"]
    size = sum(len(ids) for _, ids in hermes.prompt([{"role": "user", "content": long}]))
    (line,) = made.counts[1:]
    assert line == (
        f"--prompt-data {file}: 2 of 4 prompts take at least the 256 tokens of the context: they are left out ({file}, line 2: {size}; "
        f"{file}, line 4: {size}); raise --rollout-max-context-len, or shorten the prompts"
    )


def test_a_prompt_is_measured_with_system_message_and_tools_to_the_token(hermes, tmp_path):
    size = sum(len(ids) for _, ids in hermes.prompt([{"role": "user", "content": "q"}], [TOOL]))
    for length, left in ((size, 0), (size + 1, 1)):
        made, _ = sets(hermes, tmp_path, ["q"], length=length)
        made.prompts.tools = [TOOL]
        if left:
            assert len(made.training()) == 1
        else:
            with pytest.raises(DataError, match="1 of 1 prompts"):
                made.training()
    system = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "q"}]
    size = sum(len(ids) for _, ids in hermes.prompt(system))
    made = TaskSets(build_config({}), Long, hermes)
    made.prompts.context_length = size + 1
    assert [t.id for t in made.training()] == ["a"]
    assert "Long, split train: 1 of 2 prompts" in made.counts[0]
    assert "(task b: " in made.counts[0]


def test_what_an_environment_may_shorten_and_what_is_evaluated_is_kept_and_named(hermes, tmp_path):
    long = ["q", "q " * 200]
    made, _ = sets(hermes, tmp_path, long, Own)
    assert len(made.training()) == 2
    assert "they are kept, as the environment may shorten them" in made.counts[1]
    file = tmp_path / "d.jsonl"
    made, _ = sets(hermes, tmp_path, long, eval_prompt_data=["hard", str(file)])
    assert len(made.evaluation()["hard"]) == 2
    assert f"--eval-prompt-data hard {file}: 1 of 2 prompts" in made.counts[1]
    assert "their episodes end without a sampled token" in made.counts[1]
