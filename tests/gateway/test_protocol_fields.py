"""What comes with a request: choices in a stream, stop strings, cache markers, thoughts; a budget; weights that change meanwhile."""

import json
import math
import time
from types import SimpleNamespace

import pytest
from doubles import call
from gateway_agents import SEARCH, NotingGenerator, play_agent, reasons, user

from agentrl.engine.base import Generation
from agentrl.errors import ContractError, EngineAbort
from agentrl.gateway import AgentEnv, session
from agentrl.store import exactness_violations
from agentrl.types import FinishReason, StopReason

ASK = user("What is the capital of France?")
BODY = {"model": "policy", "messages": [ASK]}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MARK = {"cache_control": {"type": "ephemeral"}}


async def events(client, path, body):
    """The data of the events of a streamed answer."""
    status, text = await client.post(path, {**body, "stream": True})
    assert status == 200, text
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_the_choices_of_one_stream_are_separate_turns_that_can_each_be_continued(hermes):
    async def agent(client):
        chunks = await events(client, CHAT, {**BODY, "n": 3, "stream_options": {"include_usage": True}})
        texts = ["", "", ""]
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert sorted(texts) == ["A", "B", "C"]
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        for text in texts:
            await client.chat([ASK, {"role": "assistant", "content": text}, user("go on")])

    t = await play_agent(agent, ["A", "B", "C", "more"], hermes)
    assert [turn.info["request"]["parent"] for turn in t.turns] == [-1, -1, -1, 0, 1, 2]
    assert reasons(t) == ["another generation for the same conversation"] * 2


@pytest.mark.parametrize(("path", "key"), [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
async def test_a_clients_stop_string_ends_the_text_and_the_turn_continues_verbatim(path, key, hermes):
    ids = tuple(hermes.tokenizer.encode("one two"))

    def script(request):
        assert "two" in request.sampling.stop
        return Generation(ids, (-1.0,) * len(ids), FinishReason.STOP, "two")

    async def agent(client):
        body = {**BODY, key: ["two"], "max_tokens": 50}
        _, answer = await client.post(path, body)
        if path == CHAT:
            text, end = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
            assert end == "stop"
        else:
            text, end = answer["content"][0]["text"], (answer["stop_reason"], answer["stop_sequence"])
            assert end == ("stop_sequence", "two")
        assert text == "one "
        await client.post(path, {**body, "messages": [ASK, {"role": "assistant", "content": text}, user("go on")]})

    t = await play_agent(agent, script, hermes)
    assert (len(t.segments), [turn.matched_stop for turn in t.turns]) == (1, ["two", "two"])
    assert tuple(t.segments[0].spans[1].ids) == ids


async def test_thoughts_and_cache_markers_of_anthropic_clients_change_no_segment(hermes):
    question = {"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}
    tools = [{"name": "search", "input_schema": SEARCH["function"]["parameters"], **MARK}]
    base = {"model": "policy", "max_tokens": 200, "system": [{"type": "text", "text": "S", **MARK}], "tools": tools}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}

    async def agent(client):
        _, first = await client.post(MESSAGES, {**base, **thinking, "messages": [question]})
        assert [b["type"] for b in first["content"]] == ["thinking", "tool_use"]
        found = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "is_error": True, **MARK}
        results = {"role": "user", "content": [{**found, "content": [{"type": "text", "text": "r", **MARK}]}]}
        messages = [question, {"role": "assistant", "content": first["content"]}, results]
        _, second = await client.post(MESSAGES, {**base, **thinking, "messages": messages})
        messages[1] = {"role": "assistant", "content": first["content"][1:]}  # thoughts are dropped now, markers move
        hidden = {"type": "redacted_thinking", "data": "x"}
        messages += [{"role": "assistant", "content": [hidden, *second["content"]]}, {"role": "user", "content": "on"}]
        await client.post(MESSAGES, {**base, "messages": messages})

    t = await play_agent(agent, ["<think>hm</think>" + call("search", query="x"), "so", "ok"], hermes)
    assert (len(t.turns), len(t.segments), reasons(t)) == (3, 1, [])
    assert t.turns[0].info["request"]["overridden"] == thinking


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_with_an_integer_of_more_than_64_bits_reaches_an_anthropic_client(stream, hermes):
    async def agent(client):
        tools = [{"name": "search", "input_schema": {"type": "object"}}]
        status, answer = await client.post(MESSAGES, {**BODY, "max_tokens": 99, "tools": tools, "stream": stream})
        assert status == 200
        assert str(1 << 70) in str(answer)

    assert len((await play_agent(agent, [call("search", n=1 << 70)], hermes)).turns) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        ({"previous_response_id": None, "conversation": None}, None),
        ({"text": {"format": {"type": "json_schema"}}}, "text = "),
        ({"text": "short"}, "text = "),
        ({"previous_response_id": "resp_0"}, "nothing is stored; send the whole conversation as input"),
        ({"conversation": "conv_0"}, "nothing is stored; send the whole conversation as input"),
    ],
)
async def test_fields_of_responses(fields, words, hermes):
    async def agent(client):
        status, answer = await client.post(RESPONSES, {"model": "policy", "input": "hi", **fields})
        assert status == (400 if words else 200), answer
        assert not words or words in answer["error"]["message"]
        await client.chat([ASK])

    await play_agent(agent, ["one"], hermes)


# -- a budget ------------------------------------------------------------------------------------------------------------


async def test_a_spent_cost_is_answered_as_a_cut_generation_and_ends_the_episode(hermes):
    finishes = []

    async def agent(client):
        messages = [ASK]
        for _ in range(9):
            answer = await client.chat(messages)
            finishes.append(answer["finish"])
            messages = [*messages, {"role": "assistant", "content": answer["content"]}, user("go on")]
        await client.chat(messages, model="side")

    def script(request):
        return Generation((65, 66, 67, hermes.end_id), (-1.0,) * 4, FinishReason.STOP, hermes.end_id, cached_tokens=8)

    budget = {"max_cost": 100.0, "prices": (1.0, 0.5, 10.0)}
    t = await play_agent(agent, script, hermes, attributes=budget)
    contexts = [turn.context_length - 8 + 4 + 40 for turn in t.turns]
    assert t.state["gateway"]["cost"] == sum(contexts) >= 100 > sum(contexts[:-1])
    assert finishes == ["stop"] * len(t.turns) + ["length"] * (9 - len(t.turns))
    assert t.stop_reason is StopReason.MAX_TOKENS
    assert "side_calls" not in t.state["gateway"]


async def test_side_calls_cost_too(hermes):
    finishes = []

    async def agent(client):
        await client.chat([ASK], model="side")
        for messages in ([ASK], [ASK, {"content": "", "refusal": None, "role": "assistant"}, ASK]):  # as it was written
            finishes.append((await client.chat(messages))["finish"])

    t = await play_agent(agent, ["one"], hermes, attributes={"max_cost": 1.0}, laws=False)
    assert (len(t.turns), t.stop_reason, finishes) == (0, StopReason.MAX_TOKENS, ["length", "length"])


async def test_a_budget_of_seconds_ends_an_episode_as_the_last_turn_does(hermes, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, monotonic=time.monotonic, now=1000.0)
    monkeypatch.setattr(session, "time", clock)
    finishes = []

    async def agent(client):
        messages = [ASK]
        for now in (1000.0, 1059.9, 1060.0, 1061.0):
            clock.now = now
            answer = await client.chat(messages)
            finishes.append(answer["finish"])
            messages = [*messages, {"role": "assistant", "content": answer["content"]}, user("go on")]

    t = await play_agent(agent, ["one", "two", "three"], hermes, attributes={"max_seconds": 60})
    assert (len(t.turns), t.stop_reason) == (2, StopReason.MAX_TOKENS)
    assert finishes == ["stop", "stop", "length", "length"]


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, "60"])
def test_seconds_that_cannot_be_are_refused_where_they_are_declared(seconds):
    with pytest.raises(ContractError, match="max_seconds must be a number above 0, or None; found"):
        type("Timed", (AgentEnv,), {"max_seconds": seconds})


@pytest.mark.parametrize(
    "attributes",
    [{"prices": (1, 2)}, {"prices": 3}, {"prices": (1, 1, -1)}, {"max_cost": math.nan}, {"max_cost": "5"}],
)
def test_budgets_that_cannot_be_are_refused_where_they_are_declared(attributes):
    with pytest.raises(ContractError, match="prices must be three numbers of at least 0"):
        type("Priced", (AgentEnv,), attributes)


def test_a_number_of_agents_that_cannot_be_is_refused_where_it_is_declared():
    with pytest.raises(ContractError, match="max_agents must be an integer of at least 1"):
        type("Many", (AgentEnv,), {"max_agents": 0})


# -- weights that change meanwhile ---------------------------------------------------------------------------------------


async def test_a_generation_that_a_weight_update_interrupted_keeps_the_version_of_each_token(hermes):
    ids = (65, 66, 67, hermes.end_id)

    def script(request):
        return Generation(ids, (-1.0,) * 4, FinishReason.STOP, policy_version=5, versions=((4, 1), (5, 3)))

    async def agent(client):
        answer = await client.chat([ASK])
        await client.chat([ASK, {"role": "assistant", "content": answer["content"]}, user("go on")])

    t = await play_agent(agent, script, hermes, laws=False)
    assert exactness_violations([t]) == 0
    sampled = [(s.policy_version, s.ids) for s in t.segments[0].spans if s.policy_version is not None]
    assert sampled == [(4, ids[:1]), (5, ids[1:])] * 2


async def test_an_engine_that_aborts_ends_the_episode_with_the_cause_of_native_ones(hermes):
    async def agent(client):
        await client.chat([ASK])
        status, _ = await client.post(CHAT, {**BODY, "messages": [user("another")]})
        assert status == 503

    engine = NotingGenerator(hermes, ["one", EngineAbort("a weight update", "engine abort")])
    t = await play_agent(agent, engine, hermes, laws=False)
    assert (t.stop_reason, t.cause, len(t.turns)) == (StopReason.ENGINE_ABORT, "engine abort", 1)
