"""A gateway that stands alone: each key that makes requests is an episode, recorded when it is idle or the gateway closes."""

import asyncio
import re
from contextlib import suppress

import aiohttp
import pytest
from doubles import make_runner, until
from gateway_agents import NotingGenerator, check_laws, check_replay

from agentrl.config import build_config
from agentrl.gateway import AgentEnv
from agentrl.gateway.driver import GatewayDriver
from agentrl.gateway.open_gateway import OpenGateway
from agentrl.run.gateway import serve_gateway
from agentrl.store import read_episodes
from agentrl.types import StopReason


async def ask(http, gateway, key, text="hello"):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    url = f"{gateway.server.url}/v1/chat/completions"
    async with http.post(url, json=body, headers={"x-api-key": key}) as response:
        return response.status


async def test_each_key_is_an_episode_that_ends_when_it_is_idle_or_the_gateway_closes(hermes):
    recorded = []
    runner = make_runner(AgentEnv, NotingGenerator(hermes, ["one"]), hermes, driver=GatewayDriver(AgentEnv))
    gateway = OpenGateway(runner, recorded.append, host="127.0.0.1", port=0, idle_s=0.3, most=2)
    await gateway.server.start()
    async with aiohttp.ClientSession() as http:
        assert await asyncio.gather(*(ask(http, gateway, "a", str(i)) for i in range(3))) == [200] * 3
        await until(lambda: recorded)
        assert await ask(http, gateway, "a") == 200  # the next episode of the same key
        assert await ask(http, gateway, "b") == 200
        assert await ask(http, gateway, "c") == 429
        assert await ask(http, gateway, "") == 401
        await gateway.close()
    assert [(len(t.turns), t.stop_reason) for t in recorded] == [(3, StopReason.TERMINATED)] + [
        (1, StopReason.TERMINATED)
    ] * 2
    assert len({t.episode_id for t in recorded}) == 3
    for t in recorded:
        check_laws(t, runner.engine.given[: len(t.turns)])
        await check_replay(runner, t)


@pytest.mark.slow
async def test_the_command_serves_the_policy_and_records_what_ended(tmp_path):
    lines = []
    settings = {
        "hf_checkpoint": "search_r1_3m",
        "env": "agentrl.gateway:AgentEnv",
        "run": str(tmp_path / "run"),
        "tensorboard": False,
    }
    config = build_config(settings, {"gateway_idle_s": 0.2, "max_tokens_per_turn": 8})
    serving = asyncio.ensure_future(serve_gateway(config, echo=lines.append))
    await until(lambda: serving.done() or any("listening" in line for line in lines), within_s=120)
    url = re.search(r"OPENAI_BASE_URL=(\S+)", "\n".join(lines))[1]
    async with aiohttp.ClientSession() as http:
        body = {"model": "policy", "messages": [{"role": "user", "content": "Capital of Peru?"}]}
        async with http.post(f"{url}/chat/completions", json=body, headers={"x-api-key": "mine"}) as response:
            assert response.status == 200
    await until(lambda: any("episode 0-0: 1 turns" in line for line in lines))
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    (t,) = read_episodes(tmp_path / "run/episodes")
    assert t.sampled_tokens > 0
