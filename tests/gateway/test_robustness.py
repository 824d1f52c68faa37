"""Clients that repeat, leave, come late, ask for too much or for what is not served; budgets; keys."""

import asyncio
import json
import time
from contextlib import suppress

import aiohttp
import pytest
from doubles import call, make_runner, until
from gateway_agents import (
    SEARCH,
    NotingGenerator,
    agent_class,
    check_laws,
    message_of,
    play_agent,
    result,
    system,
    user,
)

from agentrl.errors import InvariantError
from agentrl.gateway import AgentEnv, server
from agentrl.gateway.driver import GatewayDriver
from agentrl.gateway.session import GatewaySession
from agentrl.rollout.recorder import Recorder
from agentrl.store.episode_record import encode, to_record
from agentrl.types import EpisodeSpec, StopReason, Task

ASK = user("What is the capital of France?")
BODY = {"model": "policy", "messages": [ASK]}
CHAT = "/v1/chat/completions"


# -- repeated requests, clients that leave -------------------------------------------------------------------------------


async def test_a_repeated_request_gets_the_first_answer_and_no_second_generation(hermes):
    async def agent(client):
        first = await client.post(CHAT, BODY)
        assert await client.post(CHAT, BODY, **{"x-stainless-retry-count": "1"}) == first

    t = await play_agent(agent, ["one", "two"], hermes)
    assert len(t.turns) == 1
    assert t.state["gateway"]["counts"] == {"repeated requests": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_while_it_waited_gets_its_answer_when_it_comes_again(hermes, stream):
    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def script(request):
        waiting.set()
        await go_on.wait()
        return "one"

    async def agent(client):
        body = {**BODY, "stream": stream}
        lost = asyncio.ensure_future(client.post(CHAT, body))
        await waiting.wait()
        lost.cancel()
        with suppress(asyncio.CancelledError):
            await lost
        second = asyncio.ensure_future(client.post(CHAT, body))
        session = playing.server._sessions.popitem()[1]
        playing.server._sessions[server._hashed(client.endpoint.api_key)] = session
        await until(lambda: session.counts["repeated requests"])
        go_on.set()
        assert (await second)[0] == 200

    env = agent_class(agent)
    playing = GatewayDriver(env)
    runner = make_runner(env, NotingGenerator(hermes, script), hermes, driver=playing)
    t = await runner.run(EpisodeSpec(Task("t", "x"), 0, 0))
    await playing.close()
    assert (len(t.turns), t.stop_reason) == (1, StopReason.TERMINATED)
    assert "undelivered" not in t.turns[0].info


async def test_an_answer_that_nobody_took_is_named_in_the_record(hermes):
    go_on = asyncio.Event()

    async def script(request):
        await go_on.wait()
        return "one"

    async def agent(client):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.post(CHAT, BODY)
        await client.post("/v1/messages/count_tokens", BODY)  # until the gateway has seen that its client left
        go_on.set()
        await client.chat([user("another question")])

    t = await play_agent(agent, script, hermes)
    assert sorted("undelivered" in turn.info for turn in t.turns) == [False, True]
    assert t.state["gateway"]["counts"]["answers not delivered"] == 1


async def test_equal_requests_of_a_client_that_listens_are_different_generations(hermes):
    async def agent(client):
        await asyncio.gather(*(client.post(CHAT, BODY) for _ in range(4)))

    t = await play_agent(agent, lambda r: [65 + r.random.randrange(26), hermes.end_id], hermes)
    assert (len(t.turns), len(t.segments)) == (4, 4)


async def test_requests_after_the_end_are_refused_and_those_in_flight_are_not_recorded(hermes):
    late = []

    async def script(request):
        if request.turn:
            await asyncio.sleep(30)
        return "one"

    class Leaves(AgentEnv):
        async def run(self, task, endpoint):
            self.session = session = aiohttp.ClientSession()
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            url = endpoint.url + CHAT
            await (await session.post(url, json=BODY, headers=headers)).read()
            late.append(asyncio.ensure_future(session.post(url, json={**BODY, "user": "x"}, headers=headers)))
            await until(lambda: engine.running)

        async def close(self):
            if len(late) > 1:
                return  # the replay, without an agent
            late.append(await late[0])
            async with self.session as session:
                late.append(await session.post(late[1].url, json=BODY, headers=late[1].request_info.headers))

    engine = NotingGenerator(hermes, script)
    t = await play_agent(Leaves, engine, hermes)
    assert [r.status for r in late[1:]] == [403, 403]
    assert "ended" in (await late[2].json())["error"]["message"]
    assert (len(t.turns), t.state["gateway"]["counts"]["requests in flight at the end"]) == (1, 1)


async def test_side_calls_are_answered_and_never_trained(hermes):
    async def agent(client):
        await client.chat([ASK])
        await client.chat([system("Write a title."), ASK], model="side")

    env = agent_class(agent)
    driver = GatewayDriver(env)
    engine = NotingGenerator(hermes, ["one", "A title"])
    t = await make_runner(env, engine, hermes, driver=driver).run(EpisodeSpec(Task("t", "x"), 0, 0))
    await driver.close()
    check_laws(t, engine.given[:1])
    assert t.state["gateway"]["side_calls"] == [{"model": "side", "messages": 2, "text": "A title"}]


# -- budgets and failures ------------------------------------------------------------------------------------------------


async def test_spent_turns_are_answered_as_a_cut_generation_and_the_agent_ends_after_its_grace(hermes):
    async def agent(client):
        messages = [ASK]
        while True:
            answer = await client.chat(messages)
            messages += [message_of(answer), user("more")]
            if answer["finish"] == "length":
                await asyncio.sleep(60)

    t = await play_agent(agent, ["one"], hermes, max_turns=3)
    assert (len(t.turns), t.stop_reason) == (3, StopReason.MAX_TURNS)
    assert t.state["gateway"]["counts"]["refused: max_turns"] == 1


async def test_an_agent_that_repeats_refused_requests_ends_too(hermes):
    async def agent(client):
        while True:
            await client.chat([ASK, user("x" * 3000)])

    t = await play_agent(agent, ["one"], hermes, max_turns=3, max_response_tokens=4, laws=False)
    assert t.stop_reason in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)


async def test_tool_results_are_cut_to_what_fits_and_prompts_are_refused(hermes):
    async def agent(client):
        answer = await client.chat([ASK], tools=[SEARCH])
        messages = [ASK, message_of(answer)]
        first = result(answer["tool_calls"][0], "word " * 1000)
        await client.chat([*messages, first], tools=[SEARCH])
        status, refused = await client.post(
            CHAT, {**BODY, "messages": [*messages, user("word " * 1000)], "tools": [SEARCH]}
        )
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")

    t = await play_agent(agent, [call("search", query="x"), "ok"], hermes, context_length=300)
    assert t.turns[0].observation_cut_tokens > 500
    assert len(t.segments[0]) <= 300


async def test_an_agent_that_never_asks_is_a_failure_and_not_a_reward(hermes):
    async def idle(client):
        return 1

    async def broken(client):
        raise KeyError("no")

    for agent, cause in ((idle, "the agent asked for no generation"), (broken, "env run: KeyError")):
        t = await play_agent(agent, ["one"], hermes, laws=False)
        assert (t.stop_reason, t.cause) == (StopReason.ENV_FAILURE, cause)


async def test_a_failing_engine_ends_the_episode_as_its_own_failure(hermes):
    async def agent(client):
        status, answer = await client.post(CHAT, BODY)
        assert (status, answer["error"]["type"]) == (503, "server_error")
        await asyncio.sleep(60)

    t = await play_agent(agent, [RuntimeError("broken")], hermes, laws=False)
    assert t.stop_reason is StopReason.ENGINE_FAILURE


async def test_an_answer_of_the_engine_that_cannot_be_recorded_ends_the_episode_too(hermes, monkeypatch):
    def refuse(recorder, generation, **more):
        raise InvariantError("experts of other tokens")

    monkeypatch.setattr(Recorder, "sampled", refuse)

    async def agent(client):
        await client.post(CHAT, BODY)

    t = await play_agent(agent, ["one"], hermes, laws=False)
    assert (t.stop_reason, "experts of other tokens" in t.detail) == (StopReason.ENGINE_FAILURE, True)


async def test_a_fault_of_the_gateway_itself_is_not_taken_for_an_end_of_the_agent(hermes, monkeypatch):
    async def lose(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(GatewaySession, "_replies", lose)

    async def agent(client):
        await client.post(CHAT, BODY)

    with pytest.raises(KeyError, match="a bug"):
        await play_agent(agent, ["one"], hermes)


async def test_an_agent_that_hangs_ends_with_the_episodes_time(hermes):
    async def agent(client):
        await client.chat([ASK])
        await asyncio.sleep(60)

    t = await play_agent(agent, ["one"], hermes, episode_timeout_s=0.5)
    assert (t.stop_reason, len(t.turns)) == (StopReason.EPISODE_TIMEOUT, 1)
    assert "the agent's run" in t.cause


async def test_the_runs_sampling_replaces_the_clients_and_both_are_recorded(hermes):
    async def agent(client):
        more = {"tools": [SEARCH], "tool_choice": "required"}
        await client.chat([ASK], temperature=0.1, top_p=0.5, seed=3, stop=["th"], max_tokens=30, **more)

    engine = NotingGenerator(hermes, ["one"])
    t = await play_agent(agent, engine, hermes, temperature=0.7)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.max_new_tokens) == (0.7, 1.0, ("th",), 30)
    assert t.segments[0].spans[1].temperature == 0.7
    assert t.turns[0].info["request"]["overridden"] == {
        "temperature": 0.1,
        "top_p": 0.5,
        "seed": 3,
        "tool_choice": "required",
    }


# -- what is refused -----------------------------------------------------------------------------------------------------

CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
}
REFUSED = {
    "not JSON": (b"{", 400, "the body is not JSON"),
    "not an object": (b"[1]", 400, "must be a JSON object"),
    "no model": ({"messages": [ASK]}, 400, "model must be the name"),
    "an unknown model": ({**BODY, "model": "gpt-4o"}, 404, "'gpt-4o' is not served; use one of: policy, side"),
    "no messages": ({"model": "policy"}, 400, "expected a list of messages"),
    "deep nesting": (
        {**BODY, "messages": [{**ASK, "content": json.loads('[' * 300 + ']' * 300)}]}, 400, "nested too deeply"
    ),
    "an unknown role": ({**BODY, "messages": [{"role": "robot", "content": "x"}]}, 400, "unknown role 'robot'"),
    "a field that is not served": ({**BODY, "web_search_options": {}}, 400, "'web_search_options' is not served"),
    "a value that is not served": ({**BODY, "logprobs": True}, 400, "logprobs = True is not served"),
    "a provider's tool": ({**BODY, "tools": [{"type": "web_search"}]}, 400, "tools of type 'web_search'"),
    "n": ({**BODY, "n": 0}, 400, "n must be an integer of at least 1"),
    "too many": ({**BODY, "n": 1000}, 400, "n must be at most 64"),
    "a stop": ({**BODY, "stop": [""]}, 400, "stop must be up to 16"),
    "arguments": ({**BODY, "messages": [ASK, CALLED, ASK]}, 400, "text that is not JSON"),
    "a foreign prefill": ({**BODY, "messages": [ASK, {"role": "assistant", "content": "I"}]}, 400, "prefill"),
    "a web image": (
        {**BODY, "messages": [user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])]},
        400,
        "image",
    ),
    "a call the template hides": (
        {**BODY, "messages": [ASK, {**CALLED, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]},
                              {"role": "tool", "tool_call_id": "a", "content": "1"}]},
        400,
        "leaves the call of 'f' in message 1 out of the prompt",
    ),
    "a body that is too large": (b" " * (server.MAX_BODY + 1), 413, "32 MiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_served_is_refused_with_a_sentence_and_the_episode_goes_on(name, hermes):
    body, status, words = REFUSED[name]

    async def agent(client):
        got, answer = await client.post(CHAT, body)
        assert (got, words in answer["error"]["message"]) == (status, True), answer
        await client.chat([ASK])

    started = time.monotonic()
    t = await play_agent(agent, ["one"], hermes)
    assert (t.stop_reason, len(t.turns)) == (StopReason.TERMINATED, 1)
    assert time.monotonic() - started < 8, "aiohttp waits 10 s for the end of a request that was refused before it"


async def test_keys_models_and_paths(hermes):
    async def agent(client):
        for headers in (
            {"Authorization": "Bearer wrong"},
            {"Authorization": ""},
            {"x-api-key": "é", "Authorization": ""},
        ):
            status, answer = await client.post(CHAT, BODY, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        key = client.endpoint.api_key
        assert (await client.post(CHAT, BODY, **{"Authorization": "", "x-api-key": key}))[0] == 200
        assert (await client.post(f"/episode/{key}/v1/chat/completions", BODY, Authorization=""))[0] == 200
        assert (await client.post("/chat/completions", BODY))[0] == 200
        assert (await client.post("/v1/embeddings", BODY))[0] == 404
        async with client.session.get(client.endpoint.url + "/v1/models", headers=client.headers) as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["policy", "side"]
        async with client.session.get(client.endpoint.url + "/v1/models/none", headers=client.headers) as response:
            assert response.status == 404

    await play_agent(agent, ["one"], hermes)


async def test_the_key_is_in_no_record_and_no_log(hermes, caplog):
    keys = []
    caplog.set_level("DEBUG")

    class Shell(AgentEnv):
        command = "sh -c 'echo $OPENAI_API_KEY; echo $OPENAI_API_KEY > key.txt; env > all.txt; exit 3'"
        files = ("*.txt",)

        async def run(self, task, endpoint):
            async with aiohttp.ClientSession() as session:
                headers = {"Authorization": f"Bearer {endpoint.api_key}"}
                await session.post(endpoint.url + CHAT, json=BODY, headers=headers)
            keys.append(endpoint.api_key)
            return await super().run(task, endpoint)

    t = await play_agent(Shell, ["one"], hermes)
    assert t.state["exit_status"] == 3
    assert t.state["files"]["key.txt"] == "[key]\n"
    assert "OPENAI_BASE_URL=http://127.0.0.1:" in t.state["files"]["all.txt"]
    assert keys[0] not in encode(to_record(t)).decode() + caplog.text + json.dumps(t.state, default=str)


async def test_two_episodes_at_once_have_different_keys_and_records(hermes):
    async def agent(client):
        for i in range(3):
            await client.chat([user(f"question {i}")])
        return client.endpoint.api_key

    env = agent_class(agent)
    driver = GatewayDriver(env)
    runner = make_runner(env, NotingGenerator(hermes, ["one"]), hermes, driver=driver)
    played = await asyncio.gather(*(runner.run(EpisodeSpec(Task("t", "x"), 0, i)) for i in range(8)))
    await driver.close()
    assert len({t.state["result"] for t in played}) == 8
    assert {len(t.turns) for t in played} == {3}
    assert not driver.server._sessions
