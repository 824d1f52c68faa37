"""Slow clients, huge bodies and streams that are cut: a clear error for them, and nothing for the other episodes."""

import asyncio
import json
import socket
from contextlib import suppress

import aiohttp
import pytest
from doubles import call, make_runner
from gateway_agents import SEARCH, NotingGenerator, agent_class, message_of, play_agent, reasons, result, user

from agentrl.gateway import server
from agentrl.gateway.driver import GatewayDriver
from agentrl.render import Tokenizer, make_renderer
from agentrl.types import EpisodeSpec, StopReason, Task

ASK = user("What is the capital of France?")
BODY = {"model": "policy", "messages": [ASK]}
CHAT = "/v1/chat/completions"


def head(client, length):
    host = client.endpoint.url.removeprefix("http://")
    key = client.endpoint.api_key
    return f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {key}\r\nContent-Length: {length}\r\n\r\n".encode()


async def raw_connection(client, **socket_options):
    """A connection of which the test controls every byte."""
    host, port = client.endpoint.url.removeprefix("http://").split(":")
    sock = socket.socket()
    for option, value in socket_options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def read_all(sock):
    data = b""
    while chunk := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        data += chunk
    return data


async def beside(env, other, engine, renderer, **limits):
    """The trajectories of two agents at one gateway, at the same time; the second plays turn after turn until the first has ended."""
    first_over = asyncio.Event()

    async def run(client):
        turns = 0
        while not (first_over.is_set() and turns):
            await other(client)
            turns += 1

    class Both(agent_class(env)):
        async def run(self, task, endpoint):
            if task.id == "other":
                return await agent_class(run)().run(task, endpoint)
            try:
                return await super().run(task, endpoint)
            finally:
                first_over.set()

    driver = GatewayDriver(Both)
    runner = make_runner(Both, engine, renderer, driver=driver, max_turns=1 << 20, **limits)
    specs = [EpisodeSpec(Task(name, "x"), 0, i) for i, name in enumerate(("first", "other"))]
    try:
        return await asyncio.gather(*map(runner.run, specs))
    finally:
        await driver.close()


async def ask(client):
    await client.chat([ASK])


async def test_a_body_that_does_not_arrive_is_answered_408_and_other_episodes_go_on(hermes, monkeypatch):
    monkeypatch.setattr(server, "READ_TIMEOUT_S", 0.3)

    async def agent(client):
        with await raw_connection(client) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, head(client, 1000) + b'{"model"')
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1 << 16), 10)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the request's body did not arrive within 0.3 s" in answer
        await client.chat([ASK])

    first, other = await beside(agent, ask, ["one"], hermes)
    assert (first.stop_reason, len(first.turns)) == (StopReason.TERMINATED, 1)
    assert (other.stop_reason, len(other.turns) > 1) == (StopReason.TERMINATED, True)


async def test_a_client_that_does_not_read_its_answer_is_left_and_the_turn_is_named_undelivered(hermes, monkeypatch):
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.3)
    given_up, playing = asyncio.Event(), []

    async def script(request):
        if request.turn:
            return "two"
        for connection in playing[0].server._runner.server.connections:
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return "word " * 40_000

    fits = server._fits

    async def agent(client):
        body = json.dumps(BODY).encode()
        with await raw_connection(client, SO_RCVBUF=4096) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, head(client, len(body)) + body)
            await asyncio.wait_for(given_up.wait(), 10)
            await client.chat([user("another question")])
            with suppress(ConnectionResetError):
                assert len(await asyncio.wait_for(read_all(sock), 10)) < 100_000, "the rest of the answer was dropped"

    monkeypatch.setattr(
        server, "_fits", lambda *a: fits(*a) or (asyncio.get_running_loop().call_later(0.5, given_up.set) and False)
    )
    env = agent_class(agent)
    playing.append(GatewayDriver(env))
    engine = NotingGenerator(hermes, script)
    t = await make_runner(
        env, engine, hermes, driver=playing[0], context_length=1 << 20, max_response_tokens=1 << 19
    ).run(EpisodeSpec(Task("t", "x"), 0, 0))
    await playing[0].close()
    assert (t.stop_reason, [bool(turn.info.get("undelivered")) for turn in t.turns]) == (
        StopReason.TERMINATED,
        [True, False],
    )


async def test_a_body_of_100_megabytes_is_refused_before_it_is_read_and_other_episodes_go_on(hermes):
    sent = 0

    async def megabytes():
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * (1 << 20)

    async def agent(client):
        with suppress(aiohttp.ClientError):
            async with client.session.post(
                client.endpoint.url + CHAT, data=megabytes(), headers=client.headers
            ) as response:
                assert response.status == 413
                assert "32 MiB" in (await response.json())["error"]["message"]
        await client.chat([ASK])

    first, other = await beside(agent, ask, ["one"], hermes)
    assert sent < 70
    assert [t.stop_reason for t in (first, other)] == [StopReason.TERMINATED] * 2
    assert len(other.turns) > 1


async def test_a_prompt_longer_than_the_context_is_refused_and_the_episode_goes_on(hermes):
    async def agent(client):
        for path, more in ((CHAT, {}), ("/v1/messages", {"max_tokens": 9})):
            status, answer = await client.post(path, {**BODY, **more, "messages": [user("word " * 2000)]})
            assert (status, "shorten the conversation" in answer["error"]["message"]) == (400, True)
        status, answer = await client.post("/v1/responses", {"model": "policy", "input": "word " * 2000})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        await client.chat([ASK])

    t = await play_agent(agent, ["one"], hermes, context_length=600)
    assert (t.stop_reason, len(t.turns), len(t.segments)) == (StopReason.TERMINATED, 1, 1)


@pytest.mark.parametrize("read_bytes", [1, 10, 200])
async def test_a_stream_that_is_cut_midway_and_repeated_is_one_turn(hermes, read_bytes):
    async def agent(client):
        body = {**BODY, "stream": True}
        async with client.session.post(client.endpoint.url + CHAT, json=body, headers=client.headers) as response:
            await response.content.read(read_bytes)
            response.close()
        status, text = await client.post(CHAT, json.loads(json.dumps(body)), **{"x-stainless-retry-count": "1"})
        again = client.post(CHAT, body, **{"x-stainless-retry-count": "2"})
        assert (status, text.endswith("data: [DONE]\n\n"), (await again)[1] == text) == (200, True, True)

    t = await play_agent(agent, ["a b c d e", "another"], hermes)
    assert (len(t.turns), t.turns[0].action.text) == (1, "a b c d e")


DROPS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("history", "segments"), [("append", 1), ("rerender", 3)])
async def test_thinking_that_the_template_strips_is_trained_once_under_either_policy(tokenizer, history, segments):
    renderer = make_renderer(
        Tokenizer(tokenizer.backend, chat_template=DROPS, special=tokenizer.special), "hermes", history=history
    )

    async def agent(client):
        messages = [ASK]
        for _ in range(3):
            answer = await client.chat(messages, tools=[SEARCH])
            calls = answer.get("tool_calls", ())
            messages += [message_of(answer), *(result(c, "found") for c in calls)]

    script = [f"<think>thought {i}</think>" + call("search", query=f"q{i}") for i in range(3)]
    t = await play_agent(agent, NotingGenerator(renderer, script), renderer)
    assert (len(t.segments), reasons(t)) == (segments, ["the template drops earlier thinking"] * (segments - 1))
    assert ("thought 0" in renderer.tokenizer.decode(t.segments[-1].ids)) == (history == "append")
