"""What a chat template leaves out of a request's conversation is refused in the protocol's own form, or counted where templates do it on purpose."""

import pytest
from gateway_agents import NotingGenerator, message_of, play_agent, system, user
from template_models import MODELS, renderer

from agentrl.errors import TemplateError
from agentrl.gateway.context_plan import ContextPlanner
from agentrl.rollout.episode import Limits
from agentrl.rollout.recorder import Recorder
from agentrl.types import StopReason

ASK = user("What is the capital of France?")
NOTE = system("Answer in one word.")
FAMILIES = [m.name for m in MODELS]
HIDES_LATE_SYSTEM = ["gpt_oss"]
"""families whose template leaves a system message out that is not the first"""


def few_shot(call_id="call00000", content=""):
    function = {"name": "search", "arguments": '{"query": "x"}'}
    calling = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    return [
        ASK,
        calling,
        {"role": "tool", "tool_call_id": call_id, "content": "found"},
        {"role": "assistant", "content": "Oslo"},
        user("And now?"),
    ]


def counts(t):
    return t.state["gateway"]["counts"]


HIDDEN_CALL = {
    "/v1/chat/completions": ({"model": "policy", "messages": few_shot()}, ("error", "message")),
    "/v1/responses": (
        {"model": "policy", "input": [
            {"role": "user", "content": "What?"}, {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "found"}, {"role": "user", "content": "And now?"},
        ]},
        ("error", "message"),
    ),
    "/v1/messages": (
        {"model": "policy", "max_tokens": 9, "messages": [
            {"role": "user", "content": "What?"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "found"}, {"type": "text", "text": "And now?"}]},
        ]},
        ("error", "message"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", HIDDEN_CALL)
async def test_every_protocol_refuses_a_few_shot_call_that_the_template_hides_and_names_it(path):
    body, where = HIDDEN_CALL[path]

    async def agent(client):
        status, answer = await client.post(path, body)
        message = answer
        for key in where:
            message = message[key]
        assert status == 400, answer
        assert "leaves the call of 'search' in message 1 out of the prompt" in message
        await client.chat([ASK])

    t = await play_agent(agent, ["Paris"], renderer("gemma3"))
    assert (t.stop_reason, len(t.turns)) == (StopReason.TERMINATED, 1)


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k2_thinking"])
async def test_a_call_whose_id_hides_its_name_is_refused(name):
    """The template shows the id of a call and not its name, which the model writes into the id."""

    async def agent(client):
        status, answer = await client.post("/v1/chat/completions", {"model": "policy", "messages": few_shot()})
        assert status == 400
        assert "leaves the call of 'search' in message 1 out of the prompt" in answer["error"]["message"]
        await client.chat(few_shot("functions.search:0"))

    await play_agent(agent, ["Paris"], renderer(name))


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "gemma3"])
async def test_a_few_shot_call_reaches_the_policy_in_every_other_family(name):
    ours = renderer(name)
    engine = NotingGenerator(ours, ["Paris"])
    messages = few_shot("functions.search:0") if name.startswith("kimi") else few_shot()
    await play_agent(lambda client: client.chat(messages), engine, ours)
    text = ours.tokenizer.decode(engine.requests[0].ids)
    assert "search" in text
    assert "found" in text


@pytest.mark.parametrize("name", ["gpt_oss", "llama3"])
async def test_content_beside_a_call_is_refused_where_the_template_has_no_place_for_it(name):
    async def agent(client):
        status, answer = await client.post(
            "/v1/chat/completions", {"model": "policy", "messages": few_shot(content="I look.")}
        )
        assert status == 400
        assert "leaves the content of message 1 (role assistant) out of the prompt" in answer["error"]["message"]
        await client.chat(few_shot())

    await play_agent(agent, ["Paris"], renderer(name))


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_late_system_message_reaches_the_policy_or_is_refused(name):
    """In the first request, and in one that continues a generation."""
    ours, statuses = renderer(name), []
    engine = NotingGenerator(ours, ["Paris"])

    async def agent(client):
        first = message_of(await client.chat([ASK]))
        for messages in ([ASK, first, NOTE, ASK], [user("Other."), NOTE, ASK]):
            status, answer = await client.post("/v1/chat/completions", {"model": "policy", "messages": messages})
            statuses.append(status)
            if status != 200:
                assert "error" in answer
            else:
                assert "Answer in one word." in ours.tokenizer.decode(engine.requests[-1].ids)

    await play_agent(agent, engine, ours)
    assert set(statuses) <= {200, 400}
    assert name not in HIDES_LATE_SYSTEM or statuses == [400, 400]


async def test_names_and_reasoning_that_the_template_leaves_out_are_counted():
    thought = {"role": "assistant", "content": "Oslo", "reasoning_content": "I think."}

    async def agent(client):
        first = message_of(await client.chat([{**ASK, "name": "alice"}, thought, {**ASK, "name": "bob"}]))
        await client.chat([{**ASK, "name": "alice"}, thought, {**ASK, "name": "bob"}, first, {**ASK, "name": "alice"}])

    seen = counts(await play_agent(agent, ["Paris"], renderer("qwen3")))
    assert seen["messages whose name the template leaves out"] == 5
    assert seen["messages whose reasoning the template leaves out"] == 2


async def test_a_request_that_the_template_shows_whole_counts_nothing():
    seen = counts(await play_agent(lambda client: client.chat([NOTE, ASK]), ["Paris"], renderer("qwen3")))
    assert not [kind for kind in seen if "template" in kind]


def test_parts_of_the_policys_own_turns_are_counted_and_not_refused():
    """A history that the client changed is rendered again; what the policy wrote in a way the template cannot show stays its own matter."""
    planner = ContextPlanner(Recorder(), renderer("llama3"), Limits())
    messages = few_shot(content="I look.")
    assert planner._require_whole(messages, [], {1}) == {
        "parts of the policy's messages that the template leaves out": 1
    }
    with pytest.raises(TemplateError, match="leaves the content of message 1"):
        planner._require_whole(messages, [], set())
