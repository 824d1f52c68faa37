"""Rollouts while servers fail: the run continues, nothing is lost or counted twice, and the table of causes reports the failures."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from doubles import groups_of, make_runner, weights
from sglang_double import Double

from agentrl import Env, StepResult
from agentrl.core.ports import free_port
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.rollout.rollout import Rollout, RolloutLimits

SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from sglang_double import Double
async def main():
    await Double(delay_s=0.3, update_s=0.5, eos=({end},), answer=lambda body: {ids!r}).start({port})
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Twice(Env):
    async def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        return StepResult(f"heard {action.text}", reward=0.5, terminated=self.steps == 2)


@pytest.fixture
def manifest(tmp_path):
    return weights(tmp_path / "weights")


def reply(hermes) -> list[int]:
    return [*hermes.tokenizer.encode("x"), hermes.end_id]


async def fleet_of(*members: Member) -> Fleet:
    fleet = Fleet(members, patience_s=30)
    await fleet.start()
    return fleet


async def run(hermes, fleet, groups=3, members=3):
    """All episodes; returns the groups' episode indices and the table."""
    runner = make_runner(Twice, fleet, hermes, context_length=250)
    done, table = await Rollout(runner, RolloutLimits(concurrency=4)).run(groups_of(groups, members))
    indices = [t.index for g in done for t in g.trajectories]
    assert sorted(indices) == list(range(groups * members))
    assert table.by_reason()["terminated"] == groups * members
    assert all(t.score == 1.0 and len(t.turns) == 2 for g in done for t in g.trajectories)
    return done, table


def failures(table) -> dict[str, int]:
    return {cause: n for (reason, cause), n in table.counts.items() if reason == "engine_failure"}


@pytest.fixture
async def double(hermes):
    ids = reply(hermes)
    server = await Double(delay_s=0.02, eos=(hermes.end_id,), answer=lambda _: ids).start()
    yield server
    await server.stop()


async def test_a_connection_reset_during_a_response(hermes, double):
    fleet = await fleet_of(Member(SGLangEngine(double.address, timeout_s=5)))
    asyncio.get_running_loop().call_later(0.05, double.faults.append, "reset")
    _, table = await run(hermes, fleet)
    assert failures(table) == {"engine: connection lost": 1}
    assert table.retried == 1
    await fleet.close()


async def test_503_for_two_seconds(hermes, double):
    fleet = await fleet_of(Member(SGLangEngine(double.address, timeout_s=5)))
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, double.refuse.update, {"/generate": 503})
    loop.call_later(2.05, double.refuse.clear)
    _, table = await run(hermes, fleet)
    assert set(failures(table)) == {"engine: HTTP 503"}
    assert 1 <= failures(table)["engine: HTTP 503"] == table.retried <= 4
    await fleet.close()


async def test_restarted_at_an_old_version(hermes, double, manifest):
    fleet = await fleet_of(Member(SGLangEngine(double.address, timeout_s=5)))
    await fleet.update_weights(manifest, 6)

    async def recovery(engine):
        await engine.update_weights(manifest, fleet.policy_version)
        return True

    fleet.recovery = recovery
    asyncio.get_running_loop().call_later(0.05, setattr, double, "weight_version", "default")
    done, table = await run(hermes, fleet)
    assert set(failures(table)) == {"engine: old weights"}
    assert {
        s.policy_version for g in done for t in g.trajectories for seg in t.segments for s in seg.spans if s.log_probs
    } == {6}
    await fleet.close()


@pytest.fixture
async def started(hermes, tmp_path, manifest):
    """A server that is a process, at version 6."""
    port = free_port()
    code = SERVER.format(tests=str(Path(__file__).parents[1]), port=port, end=hermes.end_id, ids=reply(hermes))
    address = f"http://127.0.0.1:{port}"
    process = ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / "engine.log", address)
    fleet = await fleet_of(Member(SGLangEngine(address, timeout_s=5), process))
    await fleet.update_weights(manifest, 6)

    async def recovery(engine):
        await engine.update_weights(manifest, fleet.policy_version)
        return True

    fleet.recovery = recovery
    yield fleet, process
    await fleet.close()


def kill(process):
    os.kill(process.process.pid, signal.SIGKILL)


async def test_killed_during_a_turn(hermes, started):
    fleet, process = started
    asyncio.get_running_loop().call_later(0.4, kill, process)
    done, table = await run(hermes, fleet)
    assert set(failures(table)) <= {
        "engine: connection lost",
        "engine: unreachable",
    }  # of a fresh and of a kept connection
    assert 1 <= table.retried == sum(failures(table).values()) <= 4
    assert {
        s.policy_version for g in done for t in g.trajectories for seg in t.segments for s in seg.spans if s.log_probs
    } == {6}
    assert fleet.members[0].restarts == 1


async def test_killed_during_a_sync(hermes, started, manifest):
    fleet, process = started
    asyncio.get_running_loop().call_later(0.2, kill, process)
    async with asyncio.timeout(60):
        await fleet.pause()
        await fleet.update_weights(manifest, 7)
        await fleet.resume()
    done, table = await run(hermes, fleet)
    assert failures(table) == {}
    assert {
        s.policy_version for g in done for t in g.trajectories for seg in t.segments for s in seg.spans if s.log_probs
    } == {7}
    assert fleet.members[0].restarts == 1


async def test_killed_while_paused(hermes, started, manifest):
    fleet, process = started
    await fleet.pause()
    kill(process)
    await asyncio.sleep(0.5)
    async with asyncio.timeout(60):
        await fleet.update_weights(manifest, 7)
        await fleet.resume()
    _, table = await run(hermes, fleet)
    assert failures(table) == {}
    assert fleet.causes == {"engine: server died": 1}
