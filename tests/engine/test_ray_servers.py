"""Servers on the nodes of a ray cluster: a genuine cluster of several raylets on this machine, with scripted servers."""

import asyncio
import os
import signal
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import until, weights
from ray_clusters import started

from agentrl.config import build_config
from agentrl.core import ray_cluster
from agentrl.core.child_process import process_exists
from agentrl.core.ports import free_port
from agentrl.engine.base import SamplingParams
from agentrl.engine.sglang.installation import Installation
from agentrl.engine.sglang.plan import make_fleet, plan_servers
from agentrl.errors import ConfigError
from agentrl.train.megatron.nodes import Nodes
from agentrl.train.megatron.ray_nodes import RayRanks, check_ranks

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
MODEL = Path(__file__).parents[2] / "agentrl/assets/search_r1_3m"
FIVE = SamplingParams(5)
PROGRAM = """#!{python}
import asyncio, os, pathlib, sys
sys.path.insert(0, {tests!r})
from sglang_double import Double
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
async def main():
    await Double().start(int(flags["--port"]), flags["--host"])
    pathlib.Path({pids!r}, flags["--port"]).write_text(str(os.getpid()))
    await asyncio.Event().wait()
asyncio.run(main())
"""
"""what `python -m sglang.launch_server --port P --host H …` would be"""


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs and two nodes of one CPU each, one server's worth."""
    with started([1, 1]) as cluster:
        yield cluster
        ray.shutdown()


@pytest.fixture
def settings(cluster, tmp_path, monkeypatch):
    """The flags of a run whose servers are scripted, and the folder with the servers' process ids by port."""
    pids, program = tmp_path / "pids", tmp_path / "python"
    pids.mkdir()
    tests = str(Path(__file__).parents[1])
    program.write_text(PROGRAM.format(python=sys.executable, tests=tests, pids=str(pids)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    installation = Installation(python=program, version="0.5.23")
    monkeypatch.setattr("agentrl.engine.sglang.plan.find_installation", lambda *_: installation)
    monkeypatch.setattr("agentrl.engine.sglang.launch_spec.check_flags", lambda *_: None)
    return {"engine": "sglang", "ray_address": cluster.address, "update_weight_disk_dir": str(tmp_path)}, pids


def plan(settings, *, trains=False, **more):
    return plan_servers(build_config({**settings, **more}), MODEL, 128, trains=trains)


def nodes_of_servers():
    """The node of each reserved bundle."""
    groups = ray.util.placement_group_table().values()
    return [node for g in groups if g["state"] == "CREATED" for node in g["bundles_to_node_id"].values()]


def pid_of(pids, engine):
    return int((pids / engine.address.rpartition(":")[2]).read_text())


async def test_each_server_is_on_a_node_of_its_own_and_a_killed_one_is_started_again(settings, tmp_path):
    given, pids = settings
    fleet = make_fleet(await asyncio.to_thread(plan, given, rollout_num_gpus=2), tmp_path / "run")
    await fleet.start()
    try:
        first, second = (m.engine for m in fleet.members)
        assert (tmp_path / "run/engine/engine0.log").exists()
        assert first.address != second.address
        nodes = nodes_of_servers()
        assert len(set(nodes)) == 2
        manifest = weights(tmp_path / "w")
        await fleet.update_weights(manifest, 4)
        fleet.recovery = lambda engine: _restore(engine, manifest, 4)
        killed = pid_of(pids, first)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: fleet.members[0].restarts == 1 and fleet.members[0].state == "ready", within_s=60)
        assert fleet.causes == {"engine: server died": 1}
        answers = await asyncio.gather(*(fleet.generate([1], FIVE, session=s) for s in "ab"))
        assert [a.policy_version for a in answers] == [4, 4]
    finally:
        await fleet.close()
    assert not any(process_exists(int(p.read_text())) for p in pids.iterdir())
    await until(lambda: ray.available_resources().get("CPU") == 2)  # what was reserved is given back


async def _restore(engine, manifest, version):
    await engine.update_weights(manifest, version)
    return True


async def test_a_server_whose_node_dies_starts_on_another_node_with_the_current_weights(cluster, settings, tmp_path):
    given, _ = settings
    fleet = make_fleet(await asyncio.to_thread(plan, given), tmp_path / "run")
    await fleet.start()
    try:
        manifest = weights(tmp_path / "w")
        await fleet.update_weights(manifest, 2)
        fleet.recovery = lambda engine: _restore(engine, manifest, 2)
        moved = []
        fleet.on_moved = lambda: moved.append(fleet.members[0].engine.address)
        before = fleet.members[0].engine.address
        (holder,) = nodes_of_servers()
        (node,) = [n for n in cluster.worker_nodes if n.node_id == holder]
        await asyncio.to_thread(cluster.remove_node, node)
        await until(lambda: fleet.members[0].restarts >= 1 and fleet.members[0].state == "ready", within_s=90)
        assert fleet.members[0].engine.address != before
        assert (await fleet.generate([1], FIVE, session="a")).policy_version == 2
        assert moved == [fleet.members[0].engine.address], "runner processes are told"
    finally:
        await fleet.close()
        cluster.add_node(num_cpus=1)


@pytest.mark.full
async def test_servers_join_when_the_cluster_has_room_and_leave_with_their_node(
    cluster, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("agentrl.engine.sglang.fleet.ROOM_POLL_S", 0.1)
    given, _ = settings
    planned = await asyncio.to_thread(plan, given, rollout_num_gpus=3, rollout_min_num_gpus=2)
    waits = make_fleet(replace(planned, trains=True), tmp_path / "run")
    await waits.close()
    fleet = make_fleet(planned, tmp_path / "run")
    assert (waits.grows, fleet.grows) == (False, True), "a trainer's ranks have to be placed first"
    fleet.grows = False
    await fleet.start()
    moved = []
    fleet.on_moved = lambda: moved.append(fleet.members[2].engine.address)
    try:
        manifest = weights(tmp_path / "w")
        await fleet.update_weights(manifest, 3)
        fleet.recovery = lambda engine: _restore(engine, manifest, 3)
        node = cluster.add_node(num_cpus=1)
        assert [m.state for m in fleet.members] == ["ready", "ready", "down"]
        assert len(nodes_of_servers()) == 2, "no room is asked for yet"
        fleet.grows = True
        third = fleet.members[2]
        await until(lambda: third.state == "ready", within_s=90)
        assert len(set(nodes_of_servers())) == 3
        assert moved == [third.engine.address], "runner processes are told"
        assert (third.restarts, third.engine.policy_version) == (0, 3)
        answers = await asyncio.gather(*(fleet.generate([1], FIVE, session=s) for s in "abc"))
        assert {len(m.sessions) for m in fleet.members} == {1}
        assert {a.policy_version for a in answers} == {3}
        await asyncio.to_thread(cluster.remove_node, node)
        await until(lambda: third.state == "down", within_s=90)
        assert (await fleet.generate([1], FIVE, session="c")).policy_version == 3
        cluster.add_node(num_cpus=1)
        await until(lambda: third.state == "ready", within_s=90)
        assert third.restarts == 1
    finally:
        await fleet.close()
    await until(lambda: ray.available_resources().get("CPU") == 3)  # what was reserved is given back
    await asyncio.to_thread(cluster.remove_node, max(cluster.worker_nodes, key=lambda n: n.node_id))


def test_more_servers_than_the_cluster_has_room_for_are_refused_before_any_starts(settings):
    with pytest.raises(ConfigError, match=r"^3 engines need 3 CPUs; the ray cluster at .* has 2 CPUs, 0 GPUs$"):
        plan(settings[0], rollout_num_gpus=3)
    with pytest.raises(ConfigError, match=r"^3 engines need 3 CPUs; the ray cluster at .* has 2 CPUs, 0 GPUs$"):
        plan(settings[0], rollout_num_gpus=4, rollout_min_num_gpus=3)
    for least, engine in ((3, 1), (1, 2)):
        with pytest.raises(
            ConfigError, match=rf"^--rollout-min-num-gpus {least} must be a multiple of .* {engine} and at most"
        ):
            plan(settings[0], rollout_num_gpus=2, rollout_min_num_gpus=least, rollout_num_gpus_per_engine=engine)
    with pytest.raises(ConfigError, match=r"^2 engines and 1 trainer ranks need 3 CPUs; the ray cluster"):
        plan(settings[0], rollout_num_gpus=2, trains=True)
    with pytest.raises(ConfigError, match=r"^1 engines and 2 runner processes need 3 CPUs; the ray cluster"):
        plan(settings[0], runner_processes=2)
    with pytest.raises(ConfigError, match=r"^3 runner processes need 3 CPUs; the ray cluster"):
        plan(settings[0], runner_processes=3, rollout_external_engine_addrs=["127.0.0.1:1"])


def test_more_ranks_than_the_cluster_has_room_for_are_refused_before_any_starts(cluster):
    check_ranks(cluster.address, 2, 1)
    with pytest.raises(
        ConfigError,
        match=r"^the trainer needs 1 × 2 CPUs, each 2 on one machine .* have 1 × 0 CPUs, 0 GPUs; 2 × 1 CPUs",
    ):
        check_ranks(cluster.address, 1, 2)
    with pytest.raises(ConfigError, match=r"^the trainer needs 3 × 1 CPUs"):
        check_ranks(cluster.address, 3, 1)


@pytest.mark.full
def test_each_rank_has_an_agent_on_another_node_and_gives_its_room_back(cluster, tmp_path):
    ranks = RayRanks(cluster.address, 2, 1)
    nodes = Nodes(
        range(2), ranks_per_node=1, host=ranks.address, call=ranks.start_agents, advice=ranks.why, release=ranks.release
    )
    try:
        places = nodes.places(MODEL, tmp_path, lambda number: True)
        assert [place.local_rank for place in places] == [0, 0]
        assert len(set(nodes_of_servers())) == 2
        assert places[0].rendezvous()[0] == ranks.address
    finally:
        nodes.close()
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_cluster_whose_room_others_hold_is_refused_with_what_is_free(settings, monkeypatch, tmp_path):
    given, _ = settings
    monkeypatch.setattr(ray_cluster, "PLACE_S", 1.0)
    planned = plan(given, rollout_num_gpus=2)
    held = ray.util.placement_group([{"CPU": 1}])
    assert held.wait(30)
    try:
        with pytest.raises(
            ConfigError,
            match=r"did not reserve 2 × .* within 1 s: other jobs hold its resources; available now: 1 CPUs",
        ):
            make_fleet(planned, tmp_path)
    finally:
        ray.util.remove_placement_group(held)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        (f"127.0.0.1:{free_port()}", r"--ray-address 127\.0\.0\.1:\d+: no ray cluster answers"),
        ("nowhere", "--ray-address takes auto, local or HOST:PORT, found 'nowhere'"),
    ],
    ids=["nobody listens", "not an address"],  # names without the port, which differs in each process
)
def test_a_cluster_that_does_not_answer_is_refused_at_once(monkeypatch, address, error):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=error):
        ray_cluster.connect(address)


def test_without_ray_the_error_has_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[ray\]'"):
        ray_cluster.connect("auto")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"colocate": True}, "--colocate reaches servers on this machine only"),
        ({"weight_sync": "split"}, "--weight-sync split reaches servers on this machine only"),
        ({"sglang": {"port": 30000}}, "--sglang-port is not used with --ray-address"),
        ({"node_rank": 1}, "--node-rank has no effect with --ray-address, which finds the nodes"),
    ],
)
def test_what_does_not_reach_servers_on_other_machines_is_refused(more, error):
    with pytest.raises(ConfigError, match=error):
        build_config({"engine": "sglang", "ray_address": "auto", **more})


def test_engines_that_join_later_need_a_cluster():
    with pytest.raises(ConfigError, match="--rollout-min-num-gpus needs --ray-address"):
        build_config({"engine": "sglang", "rollout_num_gpus": 2, "rollout_min_num_gpus": 1})


def test_servers_on_other_machines_need_a_folder_for_weights(settings):
    given = {k: v for k, v in settings[0].items() if k != "update_weight_disk_dir"}
    with pytest.raises(
        ConfigError, match="name a folder that trainer and servers both see with --update-weight-disk-dir"
    ):
        plan(given, trains=True)
