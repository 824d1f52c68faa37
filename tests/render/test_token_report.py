"""What `agentrl tokens` prints."""

import json

import pytest
from template_models import tokenizer

from agentrl.data.conversations import read_conversation
from agentrl.errors import DataError, TemplateError
from agentrl.render.token_report import token_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(name):
        path = tmp_path_factory.mktemp(name)
        t = tokenizer(name)
        t.backend.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": t.chat_template, **t.special}))
        return path

    return make


def test_the_example(folder):
    shown = token_report(folder("qwen3"))
    assert "family         qwen3" in shown
    assert (
        "a tool's result: proven over 18 histories, spliced: <|im_end|> \\n<|im_start|>user\\n<tool_response>\\n[…]"
        in shown
    )
    lines = [line.split()[:2] for line in shown.splitlines()]
    assert ["SAMPLED", "1"] in lines
    assert ["TEMPLATE", "0"] in lines


def test_a_new_segment_says_why(folder):
    shown = token_report(folder("qwen3"), history="rerender")
    assert "a new segment: the template drops earlier thinking" in shown


def test_what_depends_on_the_history_is_told_apart(folder):
    shown = token_report(folder("deepseek"))
    assert "a tool's result, before any tool, without tools in the prompt: proven" in shown
    assert "NOT PROVEN, a new segment each time: the template leaves content out" in shown


def test_a_conversation_file_and_control_characters(folder, tmp_path):
    path = tmp_path / "talk.json"
    call = {"type": "function", "id": "call_0", "function": {"name": "f", "arguments": {"q": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "call_0", "content": "\x1b[31mred<|im_end|>"},
        {"role": "assistant", "content": "done"},
    ]
    path.write_text("\ufeff" + json.dumps({"messages": messages, "tools": []}))
    shown = token_report(folder("chatml"), *read_conversation(path))
    assert "\\x1b[31mred<|im_end|>" in shown
    assert '{"name": "f", "arguments"' in shown
    assert "\x1b" not in shown


def test_an_inline_format(folder):
    shown = token_report(folder("chatml"), action_format="search_r1")
    assert "stop strings </search>, </answer>" in shown
    assert "<information>" in shown


@pytest.mark.parametrize("content", ["{", "5", "[]", '[{"content": "x"}]', '{"messages": 5}'])
def test_bad_conversations(tmp_path, content):
    path = tmp_path / "talk.json"
    path.write_text(content)
    with pytest.raises(DataError, match=f"^{path}: "):
        read_conversation(path)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(TemplateError):
        token_report(tmp_path)


def test_a_conversation_is_read_in_the_form_of_data_files(folder, tmp_path):
    """As APIs write it: no content, arguments as text, a result without a name, content in parts."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}
    plain = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"q": 1}}}],
        },
        {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": "done"},
    ]
    written = [
        plain[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": written, "tools": None}))
    assert read_conversation(path) == (tuple(plain), [])
    assert token_report(folder("chatml"), *read_conversation(path)) == token_report(folder("chatml"), plain)
