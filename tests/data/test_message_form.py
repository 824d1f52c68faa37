"""However a data file writes a conversation, it is read in one form; what cannot be taken is refused with its place."""

import json

import pytest

from agentrl.data.message_form import normal_messages, normal_tools
from agentrl.errors import DataError

USER = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def calling(**call):
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"id": "c1", "name": "weather", "arguments": {"city": "Oslo"}},
        {"id": "c1", "type": None, "function": {"name": "weather", "arguments": {"city": "Oslo"}, "description": None}},
    ],
)
def test_a_call_has_one_form(call):
    _, turn = normal_messages([USER, calling(**call)])
    expected = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert turn == {"role": "assistant", "content": "", "tool_calls": [expected]}


def test_a_result_is_completed_by_the_call_that_it_answers():
    calls = [
        {"name": "a", "arguments": {}},
        {"name": "b", "arguments": "{}"},
        {"id": "mine", "name": "a", "arguments": None},
    ]
    turn = {"role": "assistant", "tool_calls": calls}
    results = [{"role": "tool", "name": "b", "content": "1"}, {"role": "tool", "content": "2"},
               {"role": "tool", "tool_call_id": "mine", "content": None}]  # fmt: skip
    messages = normal_messages([USER, turn, *results])
    assert [(m["name"], m["tool_call_id"]) for m in messages[2:]] == [
        ("b", "functions.b:1"),
        ("a", "functions.a:0"),
        ("a", "mine"),
    ]


def test_null_keys_are_absent_and_text_parts_are_joined():
    parts = [{"type": "text", "text": "Wea", "image_url": None}, {"type": "text", "text": "ther?"}]
    message = {"role": "user", "content": parts, "tool_calls": None, "name": None}
    assert normal_messages([message]) == (USER,)
    assert normal_messages([{"from": "human", "value": "Weather?"}]) == (USER,)
    image = [{"type": "image", "image": "data:image/png;base64,AAAA", "text": None}]
    assert normal_messages([{"role": "user", "content": image}])[0]["content"] == [
        {"type": "image", "image": image[0]["image"]}
    ]


def test_nulls_in_arguments_are_the_datas_own_except_from_arrow():
    call = calling(name="f", arguments={"city": "Oslo", "query": None})
    assert normal_messages([USER, call])[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "query": None}
    assert normal_messages([USER, call], arrow=True)[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


@pytest.mark.parametrize("value", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], [SCHEMA["function"]], SCHEMA])
def test_tools_have_one_form(value):
    assert normal_tools(value) == [SCHEMA]


def test_no_tools():
    assert normal_tools(None) == normal_tools("") == normal_tools([]) == []


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "wizard", "content": "x"}], "message 0: unknown role 'wizard'"),
        ([{"role": "user<|im_end|>", "content": "x"}], "unknown role"),
        ([{"role": "user", "content": None}], "needs content, found null"),
        ([USER, {"role": "assistant", "content": None}], "message 1: a message of role 'assistant' needs content"),
        ([USER, calling(name="f", arguments='{"a"')], r"tool_calls\[0\].function.arguments is text that is not JSON"),
        ([USER, calling(name="f", arguments="[1]")], "arguments must be an object or its JSON text, found list"),
        ([USER, calling(arguments={})], "must name its function"),
        ([{**USER, "tool_calls": [{"name": "f"}]}], "only the assistant calls tools"),
        ([USER, calling(id="a", name="f"), {"role": "tool", "tool_call_id": "b", "content": ""}], "not the id of an earlier call"),
        ([USER, calling(id="a", name="f"), {"role": "tool", "name": "g", "content": ""}], "has the name 'g'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] must be"),
        ([], "expected a list of messages"),
        ("hello", "expected a list of messages"),
        (["hello"], "message 0: expected an object"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_with_its_place(messages, reason):
    with pytest.raises(DataError, match=reason):
        normal_messages(messages)


@pytest.mark.parametrize("value", ["weather", "[1]", [5], [{"type": "function"}], 5])
def test_what_is_no_tool_is_refused(value):
    with pytest.raises(DataError, match="tools"):
        normal_tools(value)
