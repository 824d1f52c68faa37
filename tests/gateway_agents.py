"""Agents for the tests of the gateway: Python functions that speak HTTP themselves, and what must hold of every record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from doubles import FakeGenerator, make_runner

from agentrl.engine.base import Generation
from agentrl.gateway import AgentEnv
from agentrl.gateway.driver import GatewayDriver
from agentrl.replay.replayer import replay_group
from agentrl.store import exactness_violations
from agentrl.store.episode_record import decode, encode, from_record, to_record
from agentrl.train.sample import to_samples
from agentrl.types import EpisodeSpec, Provenance, Task, Trajectory

SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}
PARIS = Task("paris", "What is the capital of France?", "Paris")


@dataclass
class NotingGenerator(FakeGenerator):
    """Notes what it gave."""

    given: list[Generation] = field(default_factory=list)

    async def generate(self, ids, sampling, **more):
        self.given.append(await super().generate(ids, sampling, **more))
        return self.given[-1]


class Client:
    """A client of the gateway that sends what it is told."""

    def __init__(self, endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint, self.session = endpoint, session
        self.headers = {"Authorization": f"Bearer {endpoint.api_key}"}

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(
            self.endpoint.url + path, data=data, headers={**self.headers, **headers}
        ) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def chat(self, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
        """The message of the answer, with its finish reason."""
        headers = more.pop("headers", {})
        body = {"model": "policy", "messages": list(messages), **more}
        status, answer = await self.post("/v1/chat/completions", body, **headers)
        assert status == 200, answer
        choice = answer["choices"][0]
        return {**choice["message"], "finish": choice["finish_reason"], "usage": answer["usage"]}


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as clients send it back."""
    kept = ("role", "content", "tool_calls", "reasoning_content")
    return {k: answer[k] for k in kept if answer.get(k) is not None}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def agent_class(function: Any, **attributes: Any) -> type[AgentEnv]:
    """An AgentEnv whose agent is `function(client)`."""

    class Agent(AgentEnv):
        async def run(self, task, endpoint):
            async with aiohttp.ClientSession() as session:
                return await function(Client(endpoint, session))

    for name, value in {"grace_s": 0.2, **attributes}.items():
        setattr(Agent, name, value)
    return Agent


async def play_agent(function: Any, script: Any, renderer: Any, *, laws: bool = True, **more: Any) -> Trajectory:
    """One episode of a Python agent; its record is checked against what the engine gave, and replayed."""
    env = function if isinstance(function, type) else agent_class(function, **more.pop("attributes", {}))
    engine = script if hasattr(script, "generate") else NotingGenerator(renderer, script)
    driver = GatewayDriver(env)
    runner = make_runner(env, engine, renderer, driver=driver, **more)
    try:
        trajectory = await runner.run(EpisodeSpec(more.pop("task", PARIS), 0, 0))
        if laws:
            check_laws(trajectory, engine.given)
            await check_replay(runner, trajectory)
        return trajectory
    finally:
        await driver.close()
        runner.close()


def check_laws(t: Trajectory, given: Sequence[Generation]) -> None:
    """The ids that are trained are exactly the ids that were sampled for a turn, once, with their log-probs."""
    assert exactness_violations([t]) == 0
    sampled = [s for g in t.segments for s in g.spans if s.provenance is Provenance.SAMPLED]
    assert Counter((s.ids, s.log_probs) for s in sampled) == Counter((g.ids, g.log_probs) for g in given if g.ids)
    assert sorted(s.turn for s in sampled) == [turn.index for turn in t.turns if turn.action.text or turn.action.calls]
    trained = Counter()
    for sample in to_samples(t):
        mask = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
        trained.update(tok for tok, m in zip(sample.tokens, mask, strict=True) if m)
    assert trained == Counter(i for s in sampled for i in s.ids)


async def check_replay(runner: Any, t: Trajectory) -> None:
    """The record, written and read, makes the same requests again without the agent."""
    read = from_record(decode(encode(to_record(t)), "test"))
    (outcome,) = await replay_group(runner, [read])
    assert outcome.divergence is None, outcome.divergence


def reasons(t: Trajectory) -> list[str]:
    """Why segments opened, in the order of the turns."""
    return [turn.info["new_segment"] for turn in t.turns if "new_segment" in turn.info]


def provenance(t: Trajectory, segment: int = 0) -> list[Provenance]:
    return [s.provenance for s in t.segments[segment].spans]
