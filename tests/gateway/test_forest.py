"""From requests to segments: what was sampled is kept verbatim and trained once, and every new segment has a reason."""

import asyncio
import json

import orjson
import pytest
from doubles import call
from gateway_agents import SEARCH, NotingGenerator, message_of, play_agent, reasons, result, system, user

from agentrl.gateway import conversation_tree as tree
from agentrl.gateway.message_match import message_key
from agentrl.store.episode_record import encode, to_record
from agentrl.types import Provenance, StopReason
from agentrl.view.episode_detail import episode_detail

ASK = user("What is the capital of France?")


async def use_tools(client, rewrite=lambda m: m, begin=(ASK,), turns=8):
    """The usual loop of an agent; `rewrite` is what its framework does to the messages before each request."""
    messages = list(begin)
    for _ in range(turns):
        answer = await client.chat(rewrite(messages), tools=[SEARCH])
        messages.append(message_of(answer))
        if answer["finish"] != "tool_calls":
            return messages
        messages += [result(c, f"about {c['function']['arguments']}") for c in answer["tool_calls"]]
    return messages


SCRIPT = [call("search", query="x", page=2), call("search", query="y") + call("search", query="z"), "Paris"]


async def test_a_tool_loop_is_one_segment_with_observations_and_results(hermes):
    t = await play_agent(use_tools, SCRIPT, hermes)
    assert (len(t.segments), t.stop_reason, t.answer) == (1, StopReason.TERMINATED, "Paris")
    assert [[r.content for r in turn.action.results] for turn in t.turns] == [
        ['about {"query":"x","page":2}'],
        ['about {"query":"y"}', 'about {"query":"z"}'],
        [],
    ]
    assert reasons(t) == []


def reserialised(messages):
    """Other key order and white space in arguments, other call ids, no names, cache markers, parts in place of texts."""
    out = []
    for m in json.loads(json.dumps(messages)):
        for c in m.get("tool_calls", ()):
            arguments = dict(reversed(json.loads(c["function"]["arguments"]).items()))
            c["function"]["arguments"] = json.dumps(arguments, indent=2)
            c["id"] = "x" + c["id"]
        if m["role"] == "tool":
            m["tool_call_id"] = "x" + m["tool_call_id"]
        if isinstance(m.get("content"), str) and m["role"] != "assistant":
            m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]
        out.append(dict(reversed(m.items())))
    return out


async def test_what_a_framework_writes_again_continues_the_same_segment(hermes):
    t = await play_agent(lambda c: use_tools(c, reserialised), SCRIPT, hermes)
    assert (len(t.segments), reasons(t)) == (1, [])
    assert t.turns[2].info["request"]["changed"]


async def test_ids_that_are_not_canonical_survive_the_way_through_text(hermes):
    letters = [i for c in "the capital" for i in hermes.tokenizer.encode(c)]
    assert letters != hermes.tokenizer.encode("the capital")

    async def agent(client):
        messages = [ASK]
        for _ in range(4):
            messages += [message_of(await client.chat(messages)), user("go on")]

    t = await play_agent(agent, NotingGenerator(hermes, [[*letters, hermes.end_id]]), hermes)
    assert [s.ids for s in t.segments[0].spans if s.provenance is Provenance.SAMPLED] == [(*letters, hermes.end_id)] * 4


async def test_reasoning_that_the_client_drops_stays_in_the_context(hermes):
    def without(messages):
        return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]

    script = ["<think>which one?</think>" + SCRIPT[0], "<think>so</think>Paris"]
    t = await play_agent(lambda c: use_tools(c, without), script, hermes)
    assert len(t.segments) == 1
    assert "which one?" in hermes.tokenizer.decode(t.segments[0].ids[: t.turns[1].context_length])


async def again(client, first, second, **more):
    """Two requests, the second made of the first's answer."""
    answer = message_of(await client.chat(first, **more.pop("first_more", {})))
    await client.chat([*second[:-1], *([answer] if more.pop("echo", True) else []), second[-1]], **more)


REASONS = {
    tree.SYSTEM_CHANGED: lambda c: again(c, [system("It is 9:00."), ASK], [system("It is 9:01."), ASK, user("more")]),
    tree.TOOLS_CHANGED: lambda c: again(c, [ASK], [ASK, user("more")], tools=[SEARCH]),
    tree.HISTORY_CHANGED: lambda c: again(c, [ASK], [user("in short: capitals"), user("more")]),
    tree.HISTORY_REPLACED: lambda c: again(
        c, [system("s"), ASK], [system("s"), user("summary: nothing yet")], echo=False
    ),
    tree.AGENT_BEGAN: lambda c: again(c, [system("s"), ASK], [system("You judge."), ASK], echo=False),
    tree.SAMPLED_AGAIN: lambda c: again(c, [ASK], [ASK], echo=False),
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda r: "-".join(r.split()[:4]))
async def test_each_new_segment_has_its_reason_and_is_counted(reason, hermes):
    t = await play_agent(REASONS[reason], ["one", "two"], hermes)
    assert (reasons(t), len(t.segments)) == ([reason], 2)
    assert t.state["gateway"]["counts"] == {f"segment: {reason}": 1}


async def test_branches_of_a_turn_begin_with_its_ids_verbatim(hermes):
    async def agent(client):
        first = [ASK, message_of(await client.chat([ASK]))]
        await asyncio.gather(*(client.chat([*first, user(f"way {i}")]) for i in range(3)))

    t = await play_agent(agent, ["odd  spacing "], hermes)
    assert reasons(t) == [tree.TURN_BRANCHED] * 2
    prefix = t.segments[0].ids[: t.turns[0].context_length + len(t.segments[0].spans[1].ids)]
    assert all(s.ids[: len(prefix)] == prefix for s in t.segments)


async def test_sub_agents_at_the_same_time_have_names_and_segments_of_their_own(hermes):
    async def agent(client):
        await use_tools(client, begin=[system("lead"), ASK], turns=1)
        await asyncio.gather(*(use_tools(client, begin=[system(f"helper {i}"), ASK]) for i in range(3)))

    def script(request):
        seen = len(request.ids) > 200
        return "done" if seen else call("search", query="a")

    t = await play_agent(agent, script, hermes, max_turns=20)
    assert {s.agent_id for s in t.segments} == {"policy", "agent-1", "agent-2", "agent-3"}
    assert len(t.segments) == 4
    assert reasons(t) == [tree.AGENT_BEGAN] * 3


async def test_n_choices_are_n_turns_and_each_can_be_continued(hermes):
    async def agent(client):
        _, answer = await client.post("/v1/chat/completions", {"model": "policy", "messages": [ASK], "n": 3})
        choices = [c["message"] for c in answer["choices"]]
        assert answer["usage"]["completion_tokens"] == 3 * 2
        for choice in reversed(choices):
            await client.chat([ASK, message_of(choice), user("more")])

    t = await play_agent(agent, lambda r: [65 + r.random.randrange(26), hermes.end_id], hermes)
    assert (len(t.turns), len(t.segments), reasons(t)) == (6, 3, [tree.SAMPLED_AGAIN] * 2)
    assert sorted(turn.segment for turn in t.turns) == [0, 0, 1, 1, 2, 2]


async def test_a_turn_that_the_client_cut_goes_on_without_a_seam(hermes):
    async def agent(client):
        messages = [ASK]
        cut = await client.chat(messages, max_tokens=2)
        assert cut["finish"] == "length"
        rest = await client.chat([*messages, message_of(cut)])
        whole = {"role": "assistant", "content": cut["content"] + rest["content"]}
        await client.chat([*messages, whole, user("thanks")])

    t = await play_agent(agent, ["one two three", " four", "ok"], hermes)
    assert (len(t.segments), t.stop_reason) == (1, StopReason.TERMINATED)
    kinds = [s.provenance for s in t.segments[0].spans]
    assert kinds[:3] == [Provenance.PROMPT, Provenance.SAMPLED, Provenance.SAMPLED]


async def test_a_cut_turn_that_is_answered_gets_its_end_token_forced(hermes):
    async def agent(client):
        cut = message_of(await client.chat([ASK], max_tokens=2))
        await client.chat([ASK, cut, user("go on")])

    t = await play_agent(agent, ["one two three", "four"], hermes)
    assert [s.ids for s in t.segments[0].spans if s.provenance is Provenance.FORCED] == [(hermes.end_id,)]


def test_the_order_of_results_and_the_words_of_a_message_count():
    a, b = ({"role": "user", "content": text} for text in ("go", "stop"))
    assert message_key(a) != message_key(b)
    assert message_key(a) != message_key({**a, "role": "system"})


async def test_the_page_names_the_agent_and_the_reason_of_each_segment(hermes):
    async def agent(client):
        first = [ASK, message_of(await client.chat([ASK]))]
        for more in ("a", "b"):
            await client.chat([*first, user(more)])
        await client.chat([system("You help."), ASK])

    t = await play_agent(agent, ["one"], hermes)
    detail = episode_detail(orjson.loads(encode(to_record(t))), None, None, None)
    assert [s["origin"] for s in detail["segments"]] == [
        "",
        f"continues turn 0; {tree.TURN_BRANCHED}",
        f"agent-1; {tree.AGENT_BEGAN}",
    ]
