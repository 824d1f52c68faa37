"""Public data formats, as small files in their exact shapes: what loads has the right ids, prompts, labels and tools; the rest is refused."""

import json

import pytest

from agentrl.data.conversations import read_conversations
from agentrl.data.data_files import load_tasks
from agentrl.errors import DataError
from agentrl.render import Tokenizer, make_renderer
from agentrl.types import Provenance

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
SEARCH_R1 = {
    "id": "train_0", "question": "who wrote it?", "golden_answers": ["Ann"], "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer: who wrote it?"}], "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann"]}}, "extra_info": {"split": "train", "index": 0},
}  # fmt: skip
VERL = {
    "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2 + 3?"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 7, "answer": "It is #### 5", "question": "2 + 3?"},
}  # fmt: skip
DAPO = {
    "data_source": "math_dapo", "prompt": [{"content": "Solve it.", "role": "user"}], "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"},
}  # fmt: skip
SLIME = {"prompt": [{"role": "user", "content": "Solve it."}], "label": "34"}
SLIME_TOOLS = {"prompt": "Solve it.", "label": "34", "metadata": {"level": 3}, "tools": [TOOL], "source": "x"}
TRL_PROMPTS = {"prompt": [{"role": "user", "content": "What color is the sky?"}]}
TASKS = {
    "search-r1": (SEARCH_R1, {"label_key": "reward_model.ground_truth.target"}, "train_0", ["Ann"], []),
    "verl": (VERL, {"label_key": "reward_model.ground_truth"}, "0", "5", []),
    "dapo": (DAPO, {"label_key": "reward_model.ground_truth"}, "0", "34", []),
    "slime": (SLIME, {}, "0", "34", []),
    "slime with tools": (SLIME_TOOLS, {"metadata_key": "metadata"}, "0", "34", ["look"]),
    "trl prompt-only": (TRL_PROMPTS, {}, "0", None, []),
}


TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tokenizer_dir):
    """A ChatML template that writes tools and calls."""
    loaded = Tokenizer.load(tokenizer_dir)
    return make_renderer(Tokenizer(loaded.backend, chat_template=TEMPLATE, special=loaded.special), "hermes")


def write(path, row):
    path.write_text(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize("name", TASKS)
def test_a_format_of_tasks_loads(tmp_path, name):
    row, keys, task_id, label, tools = TASKS[name]
    given = {"input_key": "prompt", "label_key": "label"} | keys
    (task,) = load_tasks(write(tmp_path / "tasks.jsonl", row), **given)
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
    assert (task.id, task.label, task.messages[0]["content"]) == (task_id, label, prompt)
    assert [tool["function"]["name"] for tool in task.metadata.get("tools", [])] == tools
    if name == "slime with tools":
        assert {k: v for k, v in task.metadata.items() if k != "tools"} == {"level": 3}


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"q": "sky"})}}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What color is the sky?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "assistant", "content": "It is blue."},
    ],
    "tools": [TOOL],
    "parallel_tool_calls": False,
}
SHAREGPT = {"id": "x_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
TOOLBENCH = {
    "id": "Step 3: find a sky",
    "conversations": [
        {"from": "system", "value": "You are AutoGPT, you can use tools: [{\"name\": \"look\"}]"},
        {"from": "user", "value": "What color is the sky?"},
        {"from": "assistant", "value": "\nThought: I look.\nAction: look\nAction Input: {\"q\": \"sky\"}"},
        {"from": "function", "value": "{\"error\": \"\", \"response\": \"blue\"}"},
        {"from": "assistant", "value": "\nThought: I know.\nAction: Finish\nAction Input: {\"final_answer\": \"blue\"}"},
    ],
}  # fmt: skip
TRL = {
    "messages": [{"role": "user", "content": "What color is the sky?"}, {"role": "assistant", "content": "It is blue."}]
}
TRL_COMPLETION = {
    "prompt": [{"role": "user", "content": "What color is the sky?"}],
    "completion": [{"role": "assistant", "content": "It is blue."}],
}
ALPACA = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"}
CONVERSATIONS = {
    "openai fine-tuning": (OPENAI, ["<tool_call>", "It is blue."]),
    "sharegpt": (SHAREGPT, ["Hello"]),
    "toolbench": (TOOLBENCH, ["Action: look", "Action: Finish"]),
    "trl conversational": (TRL, ["It is blue."]),
    "trl prompt-completion": (TRL_COMPLETION, ["It is blue."]),
    "trl prompt-completion as text": ({"prompt": "The sky is", "completion": " blue."}, ["blue."]),
    "alpaca": (ALPACA, ["5"]),
    "alpaca without input": ({"instruction": "Say hi.", "input": "", "output": "hi"}, ["hi"]),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_format_of_conversations_loads(tmp_path, renderer, name):
    row, said = CONVERSATIONS[name]
    (trajectory,) = read_conversations(write(tmp_path / "data.jsonl", row), renderer, 4096)
    decode = renderer.tokenizer.decode
    spans = [s for segment in trajectory.segments for s in segment.spans]
    written = [decode(s.ids) for s in spans if s.provenance is Provenance.DEMONSTRATION]
    assert len(written) == len(said)
    assert all(text in turn for text, turn in zip(said, written, strict=True)), written
    prompt = decode(trajectory.segments[0].spans[0].ids)
    if name == "alpaca":
        assert "Add the numbers.\n\n2 and 3<|im_end|>" in prompt
    if name == "openai fine-tuning":
        assert '"name": "look"' in prompt
        assert "blue" in decode([i for s in spans if s.provenance is Provenance.OBSERVATION for i in s.ids])


REFUSED = {
    "trl preference": (
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        "found the columns prompt, chosen, rejected",
    ),
    "alpaca with history": (ALPACA | {"history": [["a", "b"]]}, 'write the conversation as {"messages"'),
    "plain text": ({"text": "Once upon a time"}, "found the columns text"),
    "alpaca with a list": (ALPACA | {"output": ["5"]}, "output must be text, found list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_with_file_line_and_what_to_write(tmp_path, renderer, name):
    row, why = REFUSED[name]
    with pytest.raises(DataError) as e:
        list(read_conversations(write(tmp_path / "data.jsonl", row), renderer, 4096))
    assert str(e.value).startswith(f"{tmp_path / 'data.jsonl'}, line 1: ")
    assert why in str(e.value)
