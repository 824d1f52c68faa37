"""Several adapters to servers: each version under a name of its own, verified, sent again to a server that comes back."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from doubles import until
from sglang_double import Double

from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang.engine import SGLangEngine
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.installation import Installation
from agentrl.engine.sglang.launch_spec import AdapterForm, LaunchSpec, command_line
from agentrl.engine.sglang.members import Member
from agentrl.errors import EngineFailure
from agentrl.weight_sync.adapters import FleetAdapterSync


class Trainer:
    """Its adapters are numbers: the log-prob of every token."""

    copies, dtype = 1, "float32"

    def __init__(self, **values):
        self.values, self.exported = values, []

    def log_probs(self, rows, *, adapter):
        return [np.where(r.weights > 0, np.float32(self.values[adapter]), np.float32(0)) for r in rows]

    def export_adapter(self, path, *, adapter):
        self.exported.append(adapter)
        path.mkdir(parents=True)
        (path / "number").write_text(str(self.values[adapter]))


def number(folder):
    return float((Path(folder) / "number").read_text())


@pytest.fixture
async def servers():
    started = [await Double(lora=True, adapter_log_prob=number).start() for _ in range(2)]
    yield started
    for server in started:
        await server.stop()


@pytest.fixture
async def fleet(servers):
    fleet = Fleet(
        [Member(SGLangEngine(s.address, timeout_s=5, serves_adapters=True)) for s in servers],
        patience_s=5,
        start_timeout_s=5,
    )
    await fleet.start()
    yield fleet
    await fleet.close()


@pytest.fixture
async def sync(fleet, tmp_path):
    made = FleetAdapterSync(fleet, {"red": 0, "blue": 0}, tmp_path)
    yield made
    made.close()


async def begin(sync, trainer):
    await sync.begin(trainer)
    await sync.sync(trainer, 0)


async def asked(fleet, adapter, session="a"):
    return await fleet.generate([1, 2], SamplingParams(3, adapter=adapter), session=session)


async def test_a_request_names_its_adapter_and_learns_its_version(fleet, servers, sync):
    trainer = Trainer(red=-1.0, blue=-2.0)
    await begin(sync, trainer)
    assert sync.difference == 0
    red, blue = await asked(fleet, "red"), await asked(fleet, "blue")
    assert (red.log_probs, red.policy_version) == ((-1.0,) * 3, 0)
    assert (blue.log_probs, blue.policy_version) == ((-2.0,) * 3, 0)
    sync.versions["red"], trainer.values["red"] = 1, -1.5
    await sync.sync(trainer, 1)
    assert trainer.exported == ["red", "blue", "red"], "an adapter that has not changed is not sent"
    red, blue = await asked(fleet, "red"), await asked(fleet, "blue")
    assert (red.log_probs, red.policy_version, blue.policy_version) == ((-1.5,) * 3, 1, 0)
    assert [len(s.adapters) for s in servers] == [3, 3], (
        "a request that waits in front of the scheduler may name the former"
    )
    sync.versions["red"] = 2
    await sync.sync(trainer, 2)
    assert [len(s.adapters) for s in servers] == [3, 3], "the one before it is unloaded"
    assert [s.weight_version for s in servers] == ["2", "2"]
    assert sorted(p.name for p in sync.folder.iterdir() if p.is_dir()) == ["blue-0", "red-2"]
    with pytest.raises(EngineFailure, match=r"names the adapter 'green'; .* has red, blue"):
        await asked(fleet, "green")
    assert all(m.state == "ready" for m in fleet.members)


async def test_a_server_whose_adapter_is_another_is_taken_out(fleet, servers, sync):
    servers[1].adapter_log_prob = lambda folder: number(folder) - (0.01 if "blue" in folder else 0)
    await begin(sync, Trainer(red=-1.0, blue=-2.0))
    first, second = fleet.members
    assert first.state == "ready"
    assert second.state != "ready"
    assert fleet.causes == {"engine: weights differ": 1}
    for session in "ab":
        assert (await asked(fleet, "blue", session)).log_probs == (-2.0,) * 3


async def test_adapters_that_are_not_the_trainers_are_unloaded(fleet, servers, sync):
    wrong = servers[1]
    wrong.adapter_log_prob = lambda folder: number(folder) - 0.01
    trainer = Trainer(red=-1.0, blue=-2.0)
    await begin(sync, trainer)
    await until(lambda: wrong.adapters == {})
    engine, fleet.recovery = fleet.members[1].engine, None  # recovered by this test alone
    with pytest.raises(EngineFailure, match=r"differ from the trainer's by .*; its adapters were unloaded$"):
        await sync.recover(trainer, engine)
    wrong.refuse = {"/unload_lora_adapter": 500}
    with pytest.raises(
        EngineFailure, match=r"; it still has blue-0-\w+-\d, red-0-\w+-\d, which the next load unloads$"
    ):
        await sync.recover(trainer, engine)
    assert len(wrong.adapters) == 2
    await engine.start()  # connected again, while the server went on
    wrong.refuse, wrong.adapter_log_prob = {}, number
    assert await sync.recover(trainer, engine)
    assert set(wrong.adapters) == {engine.loaded(name).name for name in ("red", "blue")}, "the others are unloaded"


async def test_a_server_that_comes_back_is_given_all_adapters(fleet, servers, sync):
    trainer = Trainer(red=-1.0, blue=-2.0)
    await begin(sync, trainer)
    sync.versions["red"], trainer.values["red"] = 1, -1.5
    await sync.sync(trainer, 1)
    engine = fleet.members[1].engine
    servers[1].adapters.clear()
    servers[1].weight_version = "default"
    await engine.start()
    with pytest.raises(EngineFailure, match=r"names the adapter 'red'; .* has none"):
        await engine.generate([1], SamplingParams(1, adapter="red"), session="a")
    assert await sync.recover(trainer, engine)
    await engine.resume()
    got = [await engine.generate([1], SamplingParams(1, adapter=name), session="a") for name in ("red", "blue")]
    assert [(g.log_probs, g.policy_version) for g in got] == [((-1.5,), 1), ((-2.0,), 0)]
    assert trainer.exported == ["red", "blue", "red"]


async def test_a_server_that_is_started_again_at_the_first_version_is_given_them_too(fleet, servers, sync):
    await begin(sync, Trainer(red=-1.0, blue=-2.0))
    port, down = servers[0].port, fleet.members[0]
    await servers[0].stop()
    fleet.suspect(down.engine.address, EngineFailure("gone", "engine: gone"))
    servers[0].adapters.clear()
    servers[0].weight_version = "default"
    await until(lambda: down.state == "down")
    await servers[0].start(port)
    await until(lambda: down.state == "ready")
    assert set(down.engine.adapters.current) == {"red", "blue"}


async def test_a_server_that_takes_no_adapters_is_refused(servers):
    servers[0].lora = False
    engine = SGLangEngine(servers[0].address, timeout_s=5, serves_adapters=True)
    try:
        with pytest.raises(
            EngineFailure, match="takes no adapters, which --lora-adapter sends: start it with --enable-lora"
        ):
            await engine.start()
    finally:
        await engine.close()


async def test_a_request_that_waits_for_a_sync_is_sent_with_the_new_adapter(fleet, sync):
    trainer = Trainer(red=-1.0, blue=-2.0)
    await begin(sync, trainer)
    await fleet.pause()
    waiting = asyncio.create_task(asked(fleet, "red"))
    await asyncio.sleep(0)
    sync.versions["red"], trainer.values["red"] = 1, -1.5
    await sync.update(trainer, 1)
    await fleet.resume()
    generation = await waiting
    assert (generation.log_probs, generation.policy_version) == ((-1.5,) * 3, 1)


def test_servers_are_started_for_the_form_of_the_adapters(tmp_path):
    form = AdapterForm(count=2, rank=8, targets=("q_proj", "v_proj"))
    installation = Installation(python=Path("python"), version="0.5.23")
    words = command_line(
        LaunchSpec(model=tmp_path, dtype="float32", context_length=64, adapters=form), installation, 0, 1
    )
    at = words.index("--enable-lora")
    assert (
        words[at : at + 8]
        == "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --max-loras-per-batch 3".split()
    )
    assert "--enable-lora" not in command_line(
        LaunchSpec(model=tmp_path, dtype="float32", context_length=64), installation, 0, 1
    )
