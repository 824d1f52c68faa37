"""Many agents at once, a tenth of whose requests fail on the client's side: nothing is lost, trained twice or left open."""

import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import aiohttp
import pytest
from doubles import call, make_runner
from gateway_agents import SEARCH, NotingGenerator, check_laws, message_of, result, system, user

from agentrl.gateway import AgentEnv
from agentrl.gateway.driver import GatewayDriver
from agentrl.types import EpisodeSpec, StopReason, Task

FAULTS = ("leave", "cut the stream", "repeat", "garbage", "both", "late")


@dataclass
class NotingBySession(NotingGenerator):
    by_session: dict = field(default_factory=lambda: defaultdict(list))

    async def generate(self, ids, sampling, *, session, images=()):
        await asyncio.sleep(0.001 * (sampling.seed % 20))
        made = await super().generate(ids, sampling, session=session, images=images)
        self.by_session[session].append(made)
        return made


class Faulty(AgentEnv):
    """A tool loop whose client fails in a tenth of its requests; now and then it starts a sub-agent."""

    http = None
    received = {}
    late = set()
    faults = Counter()

    async def run(self, task, endpoint):
        r = Random(task.id)
        self.seen = Faulty.received[task.id] = []
        lead = [user(f"question {task.id}")]
        helper = [system("You help."), user("do it")]
        await asyncio.gather(
            self.loop(endpoint, r, lead), *([self.loop(endpoint, r, helper)] if r.random() < 0.3 else [])
        )

    async def loop(self, endpoint, r, messages):
        for _ in range(r.randrange(2, 7)):
            body = {"model": "policy", "messages": messages, "tools": [SEARCH]}
            fault = r.choice(FAULTS) if r.random() < 0.1 else ""
            Faulty.faults[fault] += 1
            answer = await self.ask(endpoint, body, fault)
            if answer["finish_reason"] == "length":
                return
            self.seen.append(answer["number"])
            messages.append(message_of(answer["message"]))
            calls = answer["message"].get("tool_calls") or ()
            messages += [result(c, "found") for c in calls] or [user("go on")]

    async def ask(self, endpoint, body, fault):
        url = f"{endpoint.openai_base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        if fault == "garbage":
            async with self.http.post(url, data=json.dumps(body)[:-9], headers=headers) as response:
                assert response.status == 400
        if fault in ("leave", "both"):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.004), self.http.post(url, json=body, headers=headers) as response:
                    await response.read()
        if fault == "cut the stream":
            async with self.http.post(url, json={**body, "stream": True}, headers=headers) as response:
                await response.content.read(10)
                response.close()
        if fault == "late":
            straggler = asyncio.ensure_future(self.straggle(url, body, headers))
            Faulty.late.add(straggler)
            straggler.add_done_callback(lambda done: done.exception() or Faulty.late.discard(done))
        if fault in ("repeat", "both"):
            headers["x-stainless-retry-count"] = "1"
        async with self.http.post(url, json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return {**answer["choices"][0], "number": answer["id"].removeprefix("chatcmpl-")}

    async def straggle(self, url, body, headers):
        await asyncio.sleep(0.05)
        async with self.http.post(url, json={**body, "user": "late"}, headers=headers) as response:
            assert response.status in (200, 403)


async def storm(renderer, seconds, concurrent, first=0):
    """Play episodes for some seconds, numbered from `first`, and check each; counts of what was played."""

    def script(request):
        return request.random.choice([call("search", query="x"), "an answer", [request.random.randrange(3, 380)]])

    engine, driver = NotingBySession(renderer, script), GatewayDriver(Faulty)
    runner = make_runner(Faulty, engine, renderer, driver=driver, max_turns=40)
    end, numbers, counts = time.monotonic() + seconds, itertools.count(first), Counter()

    async def worker():
        while time.monotonic() < end:
            index = next(numbers)
            t = await runner.run(EpisodeSpec(Task(str(index), "x"), index, index))
            check_episode(t, engine.by_session.pop(t.episode_id, []), Faulty.received.pop(t.task.id))
            engine.given.clear()
            engine.requests.clear()
            engine.released.clear()
            engine.turns.pop(t.episode_id, None)
            spans = [s for g in t.segments for s in g.spans if s.log_probs is not None]
            counts.update(
                episodes=1, turns=len(t.turns), segments=len(t.segments), sampled=sum(len(s.ids) for s in spans)
            )
            counts.update(t.state["gateway"]["counts"])

    Faulty.faults.clear()
    patient = aiohttp.ClientTimeout(total=None)  # a client that gives up is no fault of the gateway
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patient) as Faulty.http:
        await asyncio.gather(*(worker() for _ in range(concurrent)))
        await asyncio.gather(*Faulty.late)
    assert not driver.server._sessions
    await driver.close()
    runner.close()
    counts.update({f"fault: {name}": count for name, count in Faulty.faults.items() if name})
    counts["requests of agents"] = Faulty.faults.total()
    return counts


def check_episode(t, given, received):
    """Nothing that a client received or the engine sampled for a turn is lost, and each is trained once."""
    assert t.stop_reason in (StopReason.TERMINATED, StopReason.MAX_TURNS), (t.episode_id, t.stop_reason, t.detail)
    assert {str(turn.index) for turn in t.turns} >= set(received)
    assert len(received) == len(set(received))
    lost = len(given) - len(t.turns)  # of requests in flight at the end
    assert 0 <= lost <= t.state["gateway"]["counts"].get("requests in flight at the end", 0)
    kept = {s.ids for g in t.segments for s in g.spans}
    check_laws(t, given if not lost else [g for g in given if g.ids in kept][: len(t.turns)])


@pytest.mark.slow
async def test_a_storm_of_client_faults_loses_nothing_and_trains_nothing_twice(hermes):
    counts = await storm(hermes, 3, 16)
    assert counts["episodes"] > 16
    assert (
        0.05 < sum(n for name, n in counts.items() if name.startswith("fault: ")) / counts["requests of agents"] < 0.2
    )


class StarvedLoop(asyncio.SelectorEventLoop):
    """Each of the first iterations takes half a minute, as in a process that gets no CPU."""

    iterations = 0

    def time(self):
        return super().time() + 31 * min(self.iterations, 16)

    def _run_once(self):
        self.iterations += 1
        super()._run_once()


@pytest.mark.slow
def test_starved_of_cpu_a_storm_loses_nothing_and_fails_no_episode(hermes):
    with asyncio.Runner(loop_factory=StarvedLoop) as starved:
        counts = starved.run(storm(hermes, 1, 16))
    assert counts["episodes"] > 16


@pytest.mark.full
async def test_a_minute_of_256_agents_with_client_faults(hermes):
    assert (await storm(hermes, 60, 256))["episodes"] > 256
