"""A gateway that stands alone: each key that makes requests is an episode, recorded when it is idle or the gateway closes."""

import asyncio
import re
import resource
import socket
from contextlib import suppress

import aiohttp
import pytest
from doubles import make_runner, until
from gateway_agents import NotingGenerator, check_laws, check_replay

from agentrl.config import build_config
from agentrl.errors import ConfigError
from agentrl.gateway import AgentEnv
from agentrl.gateway.driver import GatewayDriver
from agentrl.gateway.open_gateway import OpenGateway
from agentrl.run.gateway import serve_gateway
from agentrl.store import EpisodeWriter, Recording, read_episodes
from agentrl.types import EpisodeSpec, StopReason, Task


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


async def test_an_episode_that_cannot_be_recorded_ends_the_gateway_and_those_before_stay(hermes, tmp_path):
    writer = EpisodeWriter(tmp_path / "episodes")
    runner = make_runner(AgentEnv, NotingGenerator(hermes, ["one"]), hermes, driver=GatewayDriver(AgentEnv))
    gateway = OpenGateway(runner, writer.write, host="127.0.0.1", port=0, idle_s=0.05, most=2)
    await gateway.server.start()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with aiohttp.ClientSession() as http:
        assert await ask(http, gateway, "a") == 200
        await until(lambda: len(Recording(tmp_path).episodes) == 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.position()[1] + 100, limit[1]))
        try:
            assert await ask(http, gateway, "b") == 200
            with pytest.raises(OSError, match="File too large"):
                await asyncio.wait_for(gateway.failed, 60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        await gateway.close()
    (t,) = read_episodes(tmp_path / "episodes")
    assert len(t.turns) == 1


async def test_an_address_that_is_taken_is_refused_before_a_run_folder_is_created(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"env": "agentrl.gateway:AgentEnv", "hf_checkpoint": "search_r1_3m", "run": str(tmp_path / "run")}
        config = build_config(settings, {"gateway_port": port})
        says = f"the gateway cannot listen on 127.0.0.1:{port}: Address already in use; choose another --gateway-port"
        with pytest.raises(ConfigError, match=says):
            await serve_gateway(config, echo=lambda _: None)
        runner = make_runner(AgentEnv, None, None, driver=GatewayDriver(AgentEnv, port=port))
        with pytest.raises(ConfigError, match=says):  # not a failure of the episode, after which others would be tried
            await runner.run(EpisodeSpec(Task("a", ""), 0, 0))
    assert not (tmp_path / "run").exists()


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
