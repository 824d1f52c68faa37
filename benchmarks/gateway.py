"""The CPU time of a turn at the gateway, beside a proxy that forwards bytes without reading them; and the memory of open sessions.

    python benchmarks/gateway.py [--concurrent 256] [--turns 8] [--rounds 3] [--sessions 10000] [--stream]

The clients run in a process of their own, whose time is not counted. Each plays a tool loop of chat completions: a turn adds a call and a result
of 400 characters. The proxy is an aiohttp server and an aiohttp client in one process; what it forwards to answers with as many bytes as the
gateway does. With `--stream` all answers are server-sent events, which the proxy forwards as they come. The gateway parses, matches, renders and
records; its engine returns a fixed generation in the same process, so that the cost of a request to an engine (benchmarks/overhead) is not in its
figure. Rounds of both alternate while `--sessions` other sessions are open; the figures are medians, the ratio that of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web
from result_record import result_record

from agentrl.core.sequences import ids_checksum
from agentrl.engine.base import Generation, SamplingParams
from agentrl.gateway import AgentEnv
from agentrl.gateway.openai_chat import CHAT
from agentrl.gateway.protocol import ModelRequest, Reply
from agentrl.gateway.server import GatewayServer, event_bytes
from agentrl.gateway.session import GatewaySession
from agentrl.render import Tokenizer, make_renderer
from agentrl.reward import Scorer
from agentrl.rollout.env_instance import ThreadPools
from agentrl.rollout.episode import Episode, EpisodeRunner, Limits
from agentrl.rollout.rollout import infrequent_gc
from agentrl.types import EpisodeSpec, FinishReason, Task, ToolCall

ROOT = Path(__file__).parents[1]
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "the capital of France"}}</tool_call>'
RESULT = "The capital of the country is the city that you know. "[:50] * 8


class Idle(AgentEnv):
    """Its agents are the clients of this benchmark."""


class FixedEngine:
    """Returns the same generation, which calls a tool."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids, self.log_probs = ids, (-0.5,) * len(ids)

    async def generate(self, ids: Any, sampling: Any, *, session: str, images: Any = ()) -> Generation:
        crc = ids_checksum(ids)
        return Generation(self.ids, self.log_probs, FinishReason.STOP, self.ids[-1], context_crc=crc)

    async def release(self, session: str) -> None: ...


def make_runner() -> EpisodeRunner:
    tokenizer = Tokenizer.load(ROOT / "agentrl/assets/search_r1_3m")
    renderer = make_renderer(tokenizer, "hermes")
    return EpisodeRunner(
        make_env=Idle,
        env_class=Idle,
        engine=FixedEngine((*tokenizer.encode(CALL), renderer.end_id)),
        renderer=renderer,
        scorer=Scorer(()),
        limits=Limits(max_turns=1000, max_response_tokens=1 << 18, context_length=1 << 19),
        sampling=SamplingParams(max_new_tokens=1),
        seed=0,
        pools=ThreadPools(Idle),
    )


# -- clients, in a process of their own ------------------------------------------------------------------------------------


def play_clients(pipe: Any, turns: int, stream: bool = False) -> None:
    asyncio.run(_clients(pipe, turns, stream))


async def _clients(pipe: Any, turns: int, stream: bool) -> None:
    upstream = await serve_upstream(stream)
    pipe.send(upstream)
    while (job := await asyncio.to_thread(pipe.recv)) is not None:
        url, keys = job
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            sizes = await asyncio.gather(*(_episode(session, url, key, turns, stream) for key in keys))
        pipe.send(max(sizes))


async def _episode(session: aiohttp.ClientSession, url: str, key: str, turns: int, stream: bool) -> int:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    size = 0
    for _ in range(turns):
        asked = {"model": "policy", "messages": messages, "tools": [TOOL], **({"stream": True} if stream else {})}
        body = json.dumps(asked).encode()
        async with session.post(f"{url}/v1/chat/completions", data=body, headers={"x-api-key": key}) as response:
            answer = await response.read()
            response.raise_for_status()
        size = len(answer)
        message = _streamed(answer) if stream else json.loads(answer)["choices"][0]["message"]
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": RESULT} for c in message["tool_calls"]]
    return size


def _streamed(answer: bytes) -> dict[str, Any]:
    """The message of a stream, which makes one call."""
    chunks = [json.loads(line[6:]) for line in answer.decode().split("\n\n") if line[6:].startswith("{")]
    begun, arguments = (c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ()))
    call = {"id": begun["id"], "type": "function", "function": {**begun["function"], **arguments["function"]}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def serve_upstream(stream: bool) -> str:
    """What the proxy forwards to: one answer of the gateway's form."""
    call = ToolCall("search", {"query": "the capital of France"}, "call_0_0")
    asked = ModelRequest(protocol="chat", model="policy", messages=[], stream=stream)
    reply = Reply(text="", calls=(call,), finish="tool_calls", prompt_tokens=100, completion_tokens=30)
    body = json.dumps(CHAT.write(asked, [reply]), separators=(",", ":")).encode()
    if stream:
        body = b"".join(map(event_bytes, CHAT.events(asked, [reply])))

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="text/event-stream" if stream else "application/json")

    return await _serve(answer)


async def _serve(handler: Any) -> str:
    server = web.ServerRunner(web.Server(handler), access_log=None)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0, backlog=4096).start()
    return f"http://127.0.0.1:{server.addresses[0][1]}"


# -- the servers under test ------------------------------------------------------------------------------------------------


async def proxy(upstream: str, session: aiohttp.ClientSession, stream: bool = False) -> str:
    async def forward(request: web.BaseRequest) -> web.Response:
        body = await request.read()
        async with session.post(upstream + request.path, data=body, headers={"x-api-key": "k"}) as response:
            return web.Response(body=await response.read(), content_type="application/json")

    async def forward_stream(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        async with session.post(upstream + request.path, data=body, headers={"x-api-key": "k"}) as response:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            async for chunk in response.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    return await _serve(forward_stream if stream else forward)


def open_sessions(server: GatewayServer, runner: EpisodeRunner, count: int) -> list[tuple[str, GatewaySession]]:
    opened = []
    for index in range(count):
        episode = Episode(runner, EpisodeSpec(Task("t", "q"), index, index))
        session = GatewaySession(episode, Idle)
        opened.append((server.register(session), session))
    return opened


async def cpu_per_turn(pipe: Any, url: str, keys: list[str], turns: int) -> tuple[float, int]:
    """CPU milliseconds of this process for a turn, and the size of an answer."""
    gc.collect()
    before = time.process_time()
    pipe.send((url, keys))
    size = await asyncio.to_thread(pipe.recv)
    return 1000 * (time.process_time() - before) / (len(keys) * turns), size


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    pipe, theirs = multiprocessing.Pipe()
    job = (theirs, args.turns, args.stream)
    clients = multiprocessing.get_context("spawn").Process(target=play_clients, args=job, daemon=True)
    clients.start()
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    proxy_url = await proxy(await asyncio.to_thread(pipe.recv), http, args.stream)
    runner, server = make_runner(), GatewayServer()
    await server.start()
    held, sessions = await memory(pipe, server, runner, args)  # first, while no memory is free to be used again
    proxied, gateway = [], []
    with infrequent_gc:  # as while a rollout runs
        for _ in range(args.rounds):
            keys = ["k"] * args.concurrent
            proxied.append((await cpu_per_turn(pipe, proxy_url, keys, args.turns))[0])
            opened = open_sessions(server, runner, args.concurrent)
            gateway.append((await cpu_per_turn(pipe, server.url, [k for k, _ in opened], args.turns))[0])
            assert all(len(s.recorder.drafts) == args.turns for _, s in opened)
            await close_sessions(server, opened)
    await close_sessions(server, held)
    result = {
        "gateway_ms": statistics.median(gateway),
        "proxy_ms": statistics.median(proxied),
        "ratio": statistics.median(g / p for g, p in zip(gateway, proxied, strict=True)),
    }
    pipe.send(None)
    await http.close()
    await server.close()
    return result | sessions


async def close_sessions(server: GatewayServer, opened: list[tuple[str, GatewaySession]]) -> None:
    for key, session in opened:
        server.unregister(key)
        await session.seal()


async def memory(
    pipe: Any, server: GatewayServer, runner: EpisodeRunner, args: argparse.Namespace
) -> tuple[list[tuple[str, GatewaySession]], dict[str, float]]:
    """Sessions, which stay open, and kilobytes of one that is open and of one that has played its turns (the first thousand play)."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    opened = open_sessions(server, runner, args.sessions)
    idle = process.memory_info().rss
    keys = [k for k, _ in opened][:1000]
    for first in range(0, len(keys), args.concurrent):
        await cpu_per_turn(pipe, server.url, keys[first : first + args.concurrent], args.turns)
    played = process.memory_info().rss
    per_session = {
        "kb_per_open_session": (idle - before) / args.sessions,
        "kb_per_played_session": (played - idle) / len(keys),
    }
    return opened, {"sessions": args.sessions, **{k: v / 1024 for k, v in per_session.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("concurrent", 256), ("turns", 8), ("rounds", 3), ("sessions", 10000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stream", action="store_true", help="answers as server-sent events")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    for name, value in result.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if args.out:
        options = " ".join(f"--{k} {v}" for k, v in vars(args).items() if k not in ("out", "stream"))
        options += " --stream" * args.stream
        record = result_record(
            "CPU of a turn at the gateway / of a raw aiohttp proxy",
            round(result["ratio"], 3),
            1.5,
            f"python benchmarks/gateway.py {options}",
            **{k: round(v, 3) for k, v in result.items()},
            load_average=round(os.getloadavg()[0], 1),
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
