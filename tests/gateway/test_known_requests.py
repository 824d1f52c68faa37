"""What is reused of earlier requests: the same normal form as without them, to the byte, whatever a client changes."""

import json
from random import Random

import orjson
import pytest

from agentrl.errors import DataError
from agentrl.gateway import known_requests
from agentrl.gateway.anthropic_messages import MESSAGES
from agentrl.gateway.conversation_tree import TOOLS_CHANGED, ConversationTree, GeneratedTurn
from agentrl.gateway.known_requests import KnownRequests, known_tools, to_json
from agentrl.gateway.openai_chat import CHAT
from agentrl.gateway.openai_responses import RESPONSES
from agentrl.gateway.protocol import ModelRequest, Reply
from agentrl.gateway.reply import answered_message
from agentrl.types import ToolCall

PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}


def call(number, arguments):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}


def random_message(r, number):
    """A message of any kind that clients write."""
    value = r.choice([1, 1.0, True, 0, -0.0, False, "1", None, [1, {"b": 2.0}]])
    return r.choice(
        [
            {"role": "user", "content": f"text {r.randrange(3)}"},
            {"role": "developer", "content": "be short"},
            {"role": "assistant", "content": None, "tool_calls": [call(number, {"a": value, "b": 2})]},
            {"role": "assistant", "content": "", "tool_calls": [call(number, json.dumps({"a": value}))]},
            {"role": "assistant", "content": "so", "reasoning_content": "why"},
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "tool", "tool_call_id": f"call_{r.randrange(number + 1)}", "content": "found"},
            PICTURE if r.random() < 0.1 else {"role": "user", "content": "x"},
            r.choice([{"role": "nobody", "content": "x"}, "text", None, 7]) if r.random() < 0.05 else {"role": "user", "content": "y"},
        ]
    )  # fmt: skip


def reordered(message):
    """The same JSON value with its keys in another order, at every depth."""
    if isinstance(message, dict):
        return {k: reordered(v) for k, v in reversed(message.items())}
    return [reordered(v) for v in message] if isinstance(message, list) else message


def retyped(value):
    """A value that is equal in Python and another in JSON."""
    if isinstance(value, dict):
        return {k: retyped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [retyped(v) for v in value]
    return {1: True, 0: -0.0, 2.0: 2}.get(value, value) if not isinstance(value, str) and value is not None else value


def changed(r, messages):
    """What a client may send after `messages`."""
    messages, at = list(messages), r.randrange(len(messages) + 1)
    kind = r.random()
    if kind < 0.6 or at == len(messages):
        return [*messages, *(random_message(r, len(messages) + i) for i in range(r.randrange(1, 3)))]
    if kind < 0.7:
        return messages[: at + 1]
    messages[at] = r.choice([reordered, retyped, lambda m: random_message(r, at)])(messages[at])
    return messages


def outcome(known, messages):
    """The conversation as bytes, or the error."""
    try:
        conversation = known.messages(orjson.loads(orjson.dumps(messages)))
    except DataError as e:
        return str(e)
    return json.dumps(conversation.messages), conversation.paths


@pytest.mark.parametrize("seed", range(40))
def test_a_request_has_the_normal_form_that_it_has_without_earlier_ones(seed):
    r, known = Random(seed), KnownRequests()
    messages = [random_message(r, 0)]
    for _ in range(60):
        messages = changed(r, messages) if r.random() < 0.95 else [random_message(r, 0)]
        assert outcome(known, messages) == outcome(KnownRequests(), messages)
        if isinstance(outcome(KnownRequests(), messages), str):
            messages = messages[:1] if isinstance(messages[0], dict) else [{"role": "user", "content": "x"}]


def test_only_new_messages_are_normalised(monkeypatch):
    seen, normal = [], known_requests.normal_messages
    monkeypatch.setattr(
        known_requests, "normal_messages", lambda given, **kw: seen.append(len(given)) or normal(given, **kw)
    )
    known = KnownRequests()
    lead, helper = [{"role": "user", "content": "lead"}], [{"role": "user", "content": "helper"}]
    for turn in range(5):
        for conversation in (lead, helper):  # taking turns, as an agent and its sub-agent do
            known.messages([dict(m) for m in conversation])
            conversation += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "on"}]
    assert seen == [1, 1, *[2, 2] * 4]


REPLIES = {
    "text": Reply(text="Paris"),
    "nothing": Reply(text="", finish="length"),
    "a call": Reply(text="", calls=(ToolCall("f", {"a": [1, 2.5, None, True], "b": "ü"}, "call_0_0"),)),
    "text and calls": Reply(text="so", calls=tuple(ToolCall("f", {"n": i}, f"call_1_{i}") for i in range(3))),
    "a large integer": Reply(text="", calls=(ToolCall("f", {"n": 1 << 70}, "call_0_0"),)),
    "thoughts": Reply(text="Paris", reasoning="hm"),
}


def returned(protocol, reply):
    """A request of a client that sends a reply back as it was written, without what it thought."""
    asked = ModelRequest(protocol=protocol.name, model="policy", messages=[])
    written = orjson.loads(to_json(protocol.write(asked, [reply])))
    question = {"role": "user", "content": "q"}
    if protocol is RESPONSES:
        return {"input": [question, *(i for i in written["output"] if i["type"] != "reasoning"), question]}
    if protocol is MESSAGES:
        answer = {"role": "assistant", "content": [b for b in written["content"] if b["type"] != "thinking"]}
    else:
        answer = {k: v for k, v in written["choices"][0]["message"].items() if k != "reasoning_content"}
    return {"messages": [question, answer, question]}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, MESSAGES], ids=lambda p: p.name)
def test_an_answer_that_comes_back_has_the_normal_form_that_it_has_if_it_is_not_known(protocol, reply, monkeypatch):
    body = {"model": "policy", **returned(protocol, reply)}
    fresh = protocol.read(body, KnownRequests())
    known, seen, normal = KnownRequests(), [], known_requests.normal_messages
    known.add_answer(protocol.returned(reply), answered_message(reply.text, reply.calls))
    monkeypatch.setattr(
        known_requests, "normal_messages", lambda given, **kw: seen.append(len(given)) or normal(given, **kw)
    )
    protocol.read({**body, **{k: v[:1] for k, v in body.items() if isinstance(v, list)}}, known)
    read = protocol.read(body, known)
    assert (read.messages, read.paths) == (fresh.messages, fresh.paths)
    rounded = protocol is MESSAGES and reply is REPLIES["a large integer"]  # its arguments are no text
    assert sum(seen) == 2 + rounded


def test_few_answers_are_kept():
    known = KnownRequests()
    for number in range(1000):
        known.add_answer({"content": str(number)}, {"role": "assistant", "content": str(number)})
    assert len(known._answers) < 100


def test_a_messages_normal_form_is_one_object_in_all_requests():
    known = KnownRequests()
    first = known.messages([{"role": "user", "content": "a"}])
    second = known.messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert first.messages[0] is second.messages[0]


def test_equal_tools_are_shared_and_others_are_not():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minimum": 1}}}
    real = json.loads(json.dumps(tool).replace("1}", "1.0}"))
    assert known_tools([tool]) is known_tools([json.loads(json.dumps(tool))])
    assert known_tools([real]) == known_tools([tool])  # in Python, not in JSON
    assert json.dumps(known_tools([real])) != json.dumps(known_tools([tool]))
    assert known_tools(None) == known_tools([]) == []
    with pytest.raises(DataError, match="web_search"):
        known_tools([{"type": "web_search"}])


def test_the_forest_does_not_take_other_tools_for_those_of_the_last_request():
    tree, asked, answer = ConversationTree(), {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    f, g = (known_tools([{"name": name}]) for name in "fg")
    match = tree.match([asked], f)
    turn = GeneratedTurn(
        index=0, segment=0, end=1, ids=(1,), message=answer, answered=answer, call_ids=(), cut=False, agent_id="policy"
    )
    node = tree.add_turn(tree.add(match.node, [asked], match.paths, f), turn, f, {})
    again = [tree.match([asked, answer, asked], tools) for tools in (g, f, g)]
    assert [(m.node is node, m.reason) for m in again] == [(False, TOOLS_CHANGED), (True, None), (False, TOOLS_CHANGED)]
