"""What a template leaves out of a prompt is found in every family: contents, calls, reasoning."""

import pytest
from template_models import MODELS, renderer

from agentrl.errors import TemplateError

NAMES = [m.name for m in MODELS]
NO_CALLS = {"gemma3"}
"""families whose template has no place for calls"""
NO_TEXT_WITH_CALL = {"gpt_oss", "llama3"}
"""families whose template has no place for content beside a call"""
USER = {"role": "user", "content": "What?"}
RESULT = {"role": "tool", "name": "search", "tool_call_id": "functions.search:0", "content": "found"}


def call(arguments):
    return {"type": "function", "id": "functions.search:0", "function": {"name": "search", "arguments": arguments}}


def few_shot(name, content="", arguments=None, **more):
    given = {"query": "x"} if arguments is None else arguments
    calling = {"role": "assistant", "content": content, "tool_calls": [call(given)], **more}
    answer = {"role": "assistant", "content": "Oslo"}
    messages = [USER, calling, RESULT, answer, USER]
    if name == "mistral":  # it takes ids of nine letters and digits
        calling["tool_calls"][0]["id"] = "abcdefgh0"
        messages[2] = {**RESULT, "tool_call_id": "abcdefgh0"}
    return messages


@pytest.mark.parametrize("arguments", [{"query": "x"}, {}, '{"query": "x"}', ""], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_in_the_prompt_or_named(name, arguments):
    ours, messages = renderer(name), few_shot(name, arguments=arguments)
    found = ours.left_out(messages)
    assert found.parts == (("the call of 'search' in message 1",) if name in NO_CALLS else ())
    if name in NO_CALLS:
        with pytest.raises(TemplateError, match="leaves the call of 'search' in message 1 out of the prompt"):
            ours.require_whole(messages)


@pytest.mark.parametrize("name", NAMES)
def test_a_content_beside_a_call_is_in_the_prompt_or_named(name):
    parts = renderer(name).left_out(few_shot(name, content="I look.")).parts
    assert ("the content of message 1 (role assistant)" in parts) is (name in NO_TEXT_WITH_CALL)


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_of_an_earlier_turn_is_counted_and_not_refused(name):
    ours = renderer(name)
    thought = dict.fromkeys(("reasoning_content", "thinking"), "Thought8c")
    messages = [USER, {"role": "assistant", "content": "Oslo", **thought}, USER]
    text = ours.tokenizer.decode([i for _, ids in ours.prompt(messages) for i in ids])
    assert ours.require_whole(messages).reasoning == ("Thought8c" not in text)
    inside = [USER, {"role": "assistant", "content": "<think>\nThought8c\n</think>\n\nOslo"}, USER]
    text = ours.tokenizer.decode([i for _, ids in ours.prompt(inside) for i in ids])
    assert ours.require_whole(inside).reasoning == ("Thought8c" not in text)


def test_a_content_that_also_stands_elsewhere_is_missed_all_the_same():
    note = {"role": "system", "content": "What?"}
    assert renderer("gpt_oss").left_out([USER, note, USER]).parts == ("the content of message 1 (role system)",)
