"""Scripted servers that hang, come back, have weights of an earlier run, or share GPUs with the trainer."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web
from doubles import until, weights
from sglang_double import Double

from agentrl.core.ports import free_port
from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang import fleet as fleet_module
from agentrl.engine.sglang.engine import MAX_RESENDS, SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.members import Member
from agentrl.engine.sglang.server_process import ServerProcess
from agentrl.errors import EngineAbort, EngineFailure
from agentrl.weight_sync import base
from agentrl.weight_sync.base import FleetSync
from agentrl.weight_sync.colocated import ColocatedSync
from agentrl.weight_sync.verify import Expected

FIVE = SamplingParams(5)
SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from sglang_double import Double
async def main():
    await Double().start({port})
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
async def doubles():
    servers = [await Double().start() for _ in range(2)]
    yield servers
    for server in servers:
        await server.stop()


def fleet_at(*doubles, patience_s=10):
    return Fleet([Member(SGLangEngine(d.address, timeout_s=5)) for d in doubles], patience_s=patience_s)


@pytest.fixture
async def fleet(doubles):
    fleet = fleet_at(*doubles)
    await fleet.start()
    yield fleet
    await fleet.close()


@pytest.fixture
def manifest(tmp_path):
    return weights(tmp_path / "weights")


def ask(fleet, session="a"):
    return fleet.generate([1], FIVE, session=session)


# -- hanging -------------------------------------------------------------------------------------------------------------


async def test_a_server_that_hangs_is_detected_and_its_requests_fail(fleet, doubles, monkeypatch):
    monkeypatch.setattr(fleet_module, "SILENT_S", 0.3)
    for d in doubles:
        d.delay_s, d.works = 1e6, False
    with pytest.raises(EngineFailure, match="answered nothing for") as e:
        await asyncio.wait_for(ask(fleet), 5)
    assert e.value.cause == "engine: hangs"
    assert fleet.causes == {"engine: hangs": 1}


async def test_a_long_generation_does_not_count_as_hanging(fleet, doubles, monkeypatch):
    monkeypatch.setattr(fleet_module, "SILENT_S", 0.1)
    for d in doubles:
        d.delay_s = 1.5
    assert (await ask(fleet)).ids
    assert fleet.causes == {}
    assert 1 < sum(d.calls.count("/health_generate") for d in doubles) < 15


async def test_idle_and_paused_servers_are_not_probed(fleet, doubles, monkeypatch):
    monkeypatch.setattr(fleet_module, "SILENT_S", 0.1)
    await ask(fleet)
    await fleet.pause()
    waiting = asyncio.create_task(ask(fleet))
    await asyncio.sleep(0.8)
    await fleet.resume()
    await waiting
    assert not any("/health_generate" in d.calls for d in doubles)


async def test_a_request_that_the_server_aborts_is_not_sent_forever(doubles):
    engine = SGLangEngine(doubles[0].address)
    await engine.start()
    doubles[0].delay_s = 1e6
    task = asyncio.create_task(engine.generate([1], FIVE, session="a"))
    while not task.done():
        await doubles[0].abort_request(None, None)
        await asyncio.sleep(0.005)
    with pytest.raises(EngineAbort, match="aborted a request 17 times"):
        await task
    assert len(doubles[0].bodies) == MAX_RESENDS + 1
    await engine.close()


async def test_a_lost_connection_does_not_take_the_server_out(fleet, doubles):
    for fault in ("close", "reset"):
        for d in doubles:
            d.faults = [fault, fault]
        for s in "ab":
            with pytest.raises(EngineFailure) as e:
                await ask(fleet, s)
            assert e.value.cause == "engine: connection lost"
    assert [m.state for m in fleet.members] == ["ready", "ready"]
    assert fleet.causes == {}
    doubles[0].faults = doubles[1].faults = ["reset"]
    doubles[0].refuse = doubles[1].refuse = {"/model_info": 503}
    with pytest.raises(EngineFailure):
        await ask(fleet)
    assert fleet.causes == {"engine: connection lost": 1}


async def test_an_invalid_response_to_the_probe_is_a_failure_and_the_probe_is_repeated(doubles):
    fleet = fleet_at(doubles[0])
    await fleet.start()
    answered = doubles[0].generate

    async def without(*_):
        return web.json_response({})

    doubles[0].generate = without
    fleet.suspect(doubles[0].address, EngineFailure("reset", "engine: unreachable"))
    await until(lambda: "log-probs of a prompt" in fleet.members[0].reason)
    doubles[0].generate = answered
    assert (await ask(fleet)).ids
    await fleet.close()


# -- coming back ---------------------------------------------------------------------------------------------------------


async def test_generations_that_wait_for_an_update_survive_a_killed_server(tmp_path, manifest):
    port = free_port()
    code = SERVER.format(tests=str(Path(__file__).parents[1]), port=port)
    address = f"http://127.0.0.1:{port}"
    server = ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / "engine.log", address)
    fleet = Fleet([Member(SGLangEngine(address, timeout_s=5), server)], patience_s=30)
    await fleet.start()
    try:
        await fleet.update_weights(manifest, 6)
        await fleet.pause()
        tasks = [asyncio.create_task(ask(fleet, s)) for s in "abc"]
        await asyncio.sleep(0.1)
        os.kill(server.process.pid, signal.SIGKILL)
        await fleet.update_weights(manifest, 7)
        await fleet.resume()
        assert [(await t).policy_version for t in tasks] == [7, 7, 7]
        assert list(fleet.causes.values()) == [1]
        assert fleet.members[0].restarts == 1
    finally:
        await fleet.close()


async def test_during_an_update_no_request_reaches_a_suspected_server(fleet, doubles):
    seen = []

    async def send(engines):
        await asyncio.gather(*(e.begin_weights(bracket=True) for e in engines))
        fleet.suspect(doubles[0].address, EngineFailure("reset", "engine: connection lost"))
        before = [len(d.bodies) for d in doubles]
        await asyncio.sleep(1.0)
        seen.append([len(d.bodies) for d in doubles] == before and not any(d.going.is_set() for d in doubles))
        await asyncio.gather(*(e.end_weights(1) for e in engines))
        return {}

    await fleet.pause()
    tasks = [asyncio.create_task(ask(fleet, s)) for s in "ab"]
    await asyncio.sleep(0.05)
    await fleet.transfer(send, 1)
    await fleet.resume()
    assert [(await t).policy_version for t in tasks] == [1, 1]
    assert seen == [True]


async def test_wrong_weights_after_a_recovery_are_not_used(fleet, doubles, manifest):
    tried = []

    async def recovery(engine):
        await engine.update_weights(manifest, fleet.policy_version)
        tried.append(engine.address)
        if len(tried) == 1:
            raise EngineFailure("log-probs differ", "engine: weights differ")
        return True

    fleet.recovery = recovery
    await fleet.update_weights(manifest, 2)
    doubles[0].weight_version = "default"
    fleet.suspect(doubles[0].address, EngineFailure("reset", "engine: connection lost"))
    await until(lambda: fleet.members[0].state == "ready")
    assert tried == [doubles[0].address] * 2
    assert not fleet.members[0].weights_unknown


async def test_a_server_that_goes_and_comes_back_is_logged(fleet, doubles, caplog):
    fleet.suspect(doubles[0].address, EngineFailure("no answer", "engine: connection lost"))
    await until(lambda: fleet.members[0].state == "ready")
    assert [(r.levelname, r.getMessage()) for r in caplog.records if doubles[0].address in r.getMessage()] == [
        ("WARNING", f"server {doubles[0].address} taken out: no answer"),
        ("WARNING", f"server {doubles[0].address} is ready, with weights of version 0"),
    ]


# -- weights of an earlier run -------------------------------------------------------------------------------------------


async def test_servers_of_an_earlier_run_keep_their_version(doubles):
    for d in doubles:
        d.weight_version = "7"
    fleet = fleet_at(*doubles)
    await fleet.start()
    assert {(await ask(fleet, s)).policy_version for s in "ab"} == {7}
    assert (await fleet.health()).policy_version == 7
    await fleet.close()


async def test_servers_of_different_versions_are_not_used_together(doubles, manifest):
    doubles[0].weight_version, doubles[1].weight_version = "7", "6"
    fleet = fleet_at(*doubles)
    await fleet.start()
    assert {(await ask(fleet, s)).policy_version for s in "abcd"} == {7}
    assert fleet.causes == {"engine: old weights": 1}
    assert not doubles[1].bodies
    await until(lambda: fleet.members[1].state == "stale")
    await fleet.update_weights(manifest, 8)
    assert [d.weight_version for d in doubles] == ["8", "8"]
    assert {(await ask(fleet, s)).policy_version for s in "efgh"} == {8}
    await fleet.close()


def test_weights_go_through_memory_only_if_they_fit(monkeypatch):
    free = shutil.disk_usage(base.MEMORY).free
    assert base.memory_for(1) == base.MEMORY
    assert base.memory_for(free) is None
    monkeypatch.setattr(base, "MEMORY", Path("/nowhere"))
    assert base.memory_for(1) is None


# -- one card in turns ---------------------------------------------------------------------------------------------------


class Trainer:
    """A trainer that notes what it was called for and which memory of the servers was released."""

    def __init__(self, doubles, manifest):
        self.doubles, self.manifest, self.on = doubles, manifest, True
        self.notes = []

    def onload(self):
        self.on = True
        self.notes.append(("onload", [sorted(d.asleep) for d in self.doubles]))

    def offload(self):
        self.on = False

    def free_mib(self):
        return 1000 - 10 * sum(len(ALL) - len(d.asleep) for d in self.doubles) - 500 * self.on

    def export_weights(self, path):
        assert self.on
        self.notes.append(("export", [sorted(d.asleep) for d in self.doubles]))
        return self.manifest

    def deliver(self, action, **arguments):
        assert self.on
        self.notes.append((action, [sorted(d.asleep) for d in self.doubles]))
        return []


@pytest.fixture
async def turns(doubles, manifest, monkeypatch):
    """(fleet of one server with a memory saver, its sync, the trainer)."""

    async def expect(*_):
        return Expected(ids=(1, 2), log_probs=(-0.5,), limit=1.0, checksums={})

    monkeypatch.setattr(base, "expected_weights", expect)
    for d in doubles:
        d.memory_saver = True
    trainer, fleet = Trainer(doubles[:1], manifest), fleet_at(doubles[0])
    sync = ColocatedSync(fleet)
    await fleet.start()
    await sync.begin(trainer)
    assert not trainer.on
    yield fleet, sync, trainer
    await fleet.close()
    sync.close()


async def test_a_late_server_is_not_waited_for_and_joins_once_training_has_begun(doubles, manifest, monkeypatch):
    monkeypatch.setattr(fleet_module, "POLL_S", 0.01)
    first, late = (Member(SGLangEngine(d.address, timeout_s=5), late=d is doubles[1]) for d in doubles)
    fleet = Fleet([first, late], grows=False)
    sync = FleetSync(fleet)
    try:
        await fleet.start()
        asked = len(doubles[1].calls)
        await asyncio.sleep(0.1)  # ten looks of the watcher
        assert (first.state, late.state, len(doubles[1].calls)) == ("ready", "down", asked)
        await sync.begin(Trainer(doubles[:1], manifest))
        await until(lambda: late.state == "ready")
    finally:
        await fleet.close()
        sync.close()


ALL = ["cuda_graph", "kv_cache", "weights"]
KEPT = ["cuda_graph", "kv_cache"]


async def test_shared_gpu_belongs_to_one_side_at_a_time(turns, doubles):
    fleet, sync, trainer = turns
    await sync.yield_gpu(trainer)
    assert trainer.on
    await sync.sync(trainer, 1)
    assert not trainer.on
    assert sync.sharing.free_mib == {
        "engine asleep": 1000,
        "trainer on the card": 500,
        "both hold weights": 490,
        "rollout": 970,
    }
    assert trainer.notes == [("onload", [ALL]), ("tensors", [KEPT])]
    assert not doubles[0].asleep
    assert (await ask(fleet)).policy_version == 1


async def test_shared_gpu_is_yielded_after_a_recovery(turns, doubles):
    fleet, sync, trainer = turns
    doubles[0].weight_version = "9"
    with pytest.raises(EngineFailure, match="restarted"):
        await ask(fleet)
    doubles[0].update_s = 0.3
    await until(lambda: trainer.notes)
    lending = asyncio.create_task(sync.yield_gpu(trainer))
    await lending
    assert trainer.on
    assert sorted(doubles[0].asleep) == ALL
    assert trainer.notes == [("onload", [KEPT]), ("export", [KEPT]), ("onload", [ALL])]
    assert doubles[0].weight_version == "0"
    await sync.sync(trainer, 1)
    assert (await ask(fleet)).policy_version == 1


async def test_shared_gpu_allows_no_recovery_while_other_servers_generate(doubles, turns, manifest):
    *_, trainer = turns
    fleet = fleet_at(*doubles)
    await fleet.start()
    sync = ColocatedSync(fleet)
    await sync.begin(trainer)
    doubles[0].weight_version = "9"
    fleet.suspect(doubles[0].address, EngineFailure("reset", "engine: connection lost"))
    await until(lambda: fleet.members[0].state == "stale")
    await asyncio.sleep(0.6)
    assert trainer.notes == []
    await sync.yield_gpu(trainer)
    await sync.sync(trainer, 1)
    assert [d.weight_version for d in doubles] == ["1", "1"]
    assert [m.state for m in fleet.members] == ["ready", "ready"]
    assert not (doubles[0].asleep | doubles[1].asleep)
    await fleet.close()
    sync.close()
