"""Trainer ranks on several machines: who may join, what must be shared, and what happens when one of them is lost."""

import functools
import json
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import build_config
from agentrl.core import secret_socket
from agentrl.core.secret_socket import accept, dial
from agentrl.errors import ConfigError, WorkerError
from agentrl.run import machines
from agentrl.train.megatron import node_agent, nodes
from agentrl.train.megatron.node_agent import NodeAgent
from agentrl.train.megatron.nodes import Nodes
from agentrl.train.megatron.rank_place import ConnectedRank, LocalRank
from agentrl.train.megatron.rank_pool import RankPool

HERE = Path(__file__).parent
TESTS = [str(HERE), str(HERE.parent)]


# -- who may join --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", ["the one that dials", "the one that listens"])
def test_a_peer_without_the_secret_is_refused_before_anything_of_it_is_read(stranger):
    secrets = {"dials": b"s" * 32, "listens": b"s" * 32}
    secrets["dials" if "dials" in stranger else "listens"] = b"x" * 32
    refused = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen():
            try:
                accept(server.accept()[0], secrets["listens"]).close()
            except (WorkerError, OSError) as e:
                refused.append(str(e))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises((WorkerError, OSError)):
            dial("127.0.0.1", server.getsockname()[1], secrets["dials"])
        thread.join(10)
    assert refused == ["a peer does not know the secret of this run"]


def test_a_peer_with_the_secret_is_heard():
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = []
        thread = threading.Thread(target=lambda: heard.append(accept(server.accept()[0], b"s" * 32).recv()))
        thread.start()
        with dial("127.0.0.1", server.getsockname()[1], b"s" * 32) as connection:
            connection.send({"a": 1})
        thread.join(10)
    assert heard == [{"a": 1}]


# -- agents in threads, with ranks that echo -----------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Starts agents in threads of this process when they are called; ranks are scripted."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*TESTS, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(node_agent, "LocalRank", functools.partial(LocalRank, module="echo_rank"))
    monkeypatch.setattr(
        "agentrl.train.megatron.rank_place.ConnectedRank", functools.partial(ConnectedRank, module="echo_rank")
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    made = Cluster(model, tmp_path / "run")
    yield made
    made.close()


class Cluster:
    def __init__(self, model, run):
        self.model, self.run, self.away = model, run, set()
        self.agents, self.threads, self.nodes, self.ended = {}, [], None, {}
        self.pools, self.serving = [], {}

    def call(self, missing, controller):
        for number in set(missing) - self.away:
            agent = self.agents[number] = NodeAgent(controller, number)
            thread = threading.Thread(target=lambda n=number, a=agent: self.ended.update({n: a.serve()}), daemon=True)
            thread.start()
            self.threads.append(thread)
            self.serving[number] = thread

    def start(self, numbers=(1, 2), **options):
        options = {"ranks_per_node": 2, "local_ranks": 1, "join_s": 20.0, "rejoin_s": 0.3, **options}
        self.nodes = Nodes(
            numbers, host="127.0.0.1", call=self.call, advice=lambda: "ADVICE", release=lambda: None, **options
        )
        return self.nodes

    def pool(self, fits=lambda ranks: True):
        self.run.mkdir(exist_ok=True)
        self.pools.append(RankPool(self.nodes.places(self.model, self.run, fits), self.run / "trainer", 3))
        return self.pools[-1]

    def lose(self, number):
        """The agent's machine disappears, with its ranks."""
        disconnect(self.agents.pop(number)._connection)
        self.serving[number].join(20)
        assert not self.serving[number].is_alive()

    def close(self):
        for pool in self.pools:
            pool.close()
        if self.nodes is not None:
            self.nodes.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def disconnect(connection):
    """Ends a connection that a thread waits on, which closing it here would not."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def ask(pool):
    return pool.request("what", [{"rank": rank} for rank in range(len(pool.connections))], 20.0)


def test_ranks_run_on_this_machine_first_and_then_node_by_node(cluster):
    cluster.start()
    places = cluster.nodes.places(cluster.model, cluster.run, lambda ranks: True)
    assert [place.local_rank for place in places] == [0, 0, 1, 0, 1]
    pool = RankPool(places, cluster.run / "trainer", 3)
    answers = ask(pool)
    assert [a["rank"] for a in answers] == [0, 1, 2, 3, 4]
    assert len({a["pid"] for a in answers}) == 5
    assert {a["threads"] for a in answers} == {"3"}
    assert {(cluster.run / f"trainer/rank{r}.log").read_text() for r in range(5)} == {"started\n"}
    pool.close()
    assert not [a["pid"] for a in answers if Path(f"/proc/{a['pid']}").exists()]
    cluster.nodes.close()
    for thread in cluster.threads:
        thread.join(10)
    assert cluster.ended == {1: True, 2: True}, "the run ended; the nodes were not left alone"


def test_a_rank_that_is_killed_on_a_node_is_named_with_its_signal(cluster):
    cluster.start()
    pool = cluster.pool()
    pids = [a["pid"] for a in ask(pool)]
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"what: rank 3 was killed by SIGKILL; the end of .*rank3\.log:\nstarted"):
        ask(pool)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "all ranks are stopped"
    assert len(ask(cluster.pool())) == 5, "the node has room again"


def test_a_node_that_is_lost_is_waited_for_and_starts_its_ranks_when_it_is_back(cluster):
    cluster.start()
    pool = cluster.pool()
    ask(pool)
    cluster.lose(2)
    with pytest.raises(WorkerError, match=r"what: rank [34] (ended with its machine, node 2|closed|has been)"):
        ask(pool)
    assert len(ask(cluster.pool())) == 5


def test_a_node_that_does_not_come_back_is_left_out_where_the_ranks_still_divide(cluster, caplog):
    cluster.start()
    ask(cluster.pool())
    cluster.lose(1)
    cluster.away = {1}
    assert len(ask(cluster.pool(lambda ranks: ranks == 3))) == 3
    assert "2 of 3 nodes are left: the trainer goes on with 3 ranks" in caplog.text
    with pytest.raises(WorkerError, match="1 of 2 nodes are left, too few for the trainer's ranks"):
        cluster.pool(lambda ranks: ranks == 5)
    cluster.away = set()
    assert len(ask(cluster.pool(lambda ranks: ranks == 5))) == 5, "it is asked for again at each start"


def test_a_lost_node_is_called_again_while_the_ranks_wait(cluster, monkeypatch):
    monkeypatch.setattr(nodes, "RECALL_S", 0.1)
    cluster.start(rejoin_s=20.0)
    ask(cluster.pool())
    cluster.lose(1)
    cluster.away = {1}
    timer = threading.Timer(0.3, cluster.away.clear)  # the first call finds nobody
    timer.start()
    assert len(ask(cluster.pool())) == 5
    timer.join()


def test_a_node_that_never_joins_is_named_with_what_to_do(cluster):
    cluster.away = {2}
    cluster.start(join_s=0.2)
    with pytest.raises(ConfigError, match=r"^node 2 did not join within 0\.2 s; ADVICE$"):
        cluster.pool()


def test_closing_ends_the_wait_for_nodes(cluster):
    cluster.away = {1}
    cluster.start()
    timer = threading.Timer(0.1, cluster.nodes.close)
    timer.start()
    with pytest.raises(WorkerError, match="the trainer was closed"):
        cluster.pool()
    timer.join()


@pytest.mark.parametrize(
    ("difference", "error"),
    [
        ("folder", r"node 1 \(.*\) does not see what is written to .*run; .*a folder that all of them share"),
        ("shared", r"node 1 \(.*\) does not see what is written to .*weights; .*a folder that all of them share"),
        ("model", r"node 1 \(.*\) has no or another model at .*model"),
        ("versions", r"node 1 \(.*\) has torch 0\.1, this machine .*; install equal versions"),
        ("gpus", r"node 1 \(.*\) has 1 GPUs, but needs 0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_before_a_rank_starts(cluster, monkeypatch, tmp_path, difference, error):
    (tmp_path / "weights").mkdir()
    sees = NodeAgent.sees
    blind = {"folder": cluster.run, "shared": tmp_path / "weights"}.get(difference)
    monkeypatch.setattr(
        NodeAgent, "sees", lambda agent, probe, text: probe.parent != blind and sees(agent, probe, text)
    )
    if difference == "model":
        monkeypatch.setattr(node_agent, "folder_digest", lambda folder: "another")
    if difference == "versions":
        monkeypatch.setattr(node_agent, "versions", lambda: {"torch": "0.1"})
        monkeypatch.setattr(secret_socket, "versions", lambda: {"torch": "2.0"})
    if difference == "gpus":
        monkeypatch.setattr(node_agent, "gpus", lambda: [None])
    cluster.start([1], shared=[tmp_path / "weights"])
    with pytest.raises(ConfigError, match=error):
        cluster.pool()
    assert not list(cluster.run.glob(".probe-*")), "the probe is removed"


# -- the command's side --------------------------------------------------------------------------------------------------


def settings(tmp_path, **given):
    base = {"env": "search_r1", "actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "run": str(tmp_path / "run")}
    return build_config({**base, "update_weight_disk_dir": str(tmp_path), **given})


@pytest.mark.parametrize(
    ("environment", "given", "want"),
    [
        ({"NODE_RANK": "1"}, {}, 1),
        ({"GROUP_RANK": "1"}, {}, 1),
        ({"NODE_RANK": "1"}, {"node_rank": 0}, 0),
        ({"NODE_RANK": "1"}, {"actor_num_nodes": 1, "update_weight_disk_dir": None}, 0),
        ({}, {}, "needs --node-rank, or the environment variable NODE_RANK, from 0 to 1 on each node; found ''"),
        ({"NODE_RANK": "2"}, {}, "from 0 to 1 on each node; found '2'"),
        ({"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, {}, "give torchrun --nproc-per-node 1"),
    ],
)
def test_the_number_of_a_node(tmp_path, environment, given, want):
    config = settings(tmp_path, **given)
    if isinstance(want, int):
        assert machines.node_rank(config, environment) == want
    else:
        with pytest.raises(ConfigError, match=want):
            machines.node_rank(config, environment)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"actor_num_gpus_per_node": None}, "--actor-num-nodes 2 needs --actor-num-gpus-per-node"),
        ({"node_rank": 2}, "--node-rank 2 is not a node of --actor-num-nodes 2"),
        ({"engine": "sglang"}, "--actor-num-nodes 2 needs --weight-sync disk, without --colocate"),
        ({"engine": "sglang", "colocate": True}, "--actor-num-nodes 2 needs --weight-sync disk, without --colocate"),
        (
            {"actor_num_nodes": 1, "update_weight_disk_dir": None, "node_rank": 0},
            "--node-rank has no effect without --actor-num-nodes",
        ),
        ({"actor_num_nodes": 1, "update_weight_disk_dir": None, "master_addr": "h"}, "--master-addr has no effect"),
        ({"actor_num_nodes": 1, "update_weight_disk_dir": None, "master_port": 5}, "--master-port has no effect"),
    ],
)
def test_settings_that_cannot_work_on_several_nodes_are_refused(tmp_path, given, error):
    with pytest.raises(ConfigError, match=error):
        settings(tmp_path, **given)


def test_ranks_on_several_nodes_need_a_folder_for_weights(tmp_path):
    machines.require_weights_folder(settings(tmp_path))
    with pytest.raises(ConfigError, match="needs --update-weight-disk-dir, a folder that all nodes share"):
        machines.require_weights_folder(settings(tmp_path, update_weight_disk_dir=None))


def test_another_node_does_not_run_the_loop(tmp_path):
    with pytest.raises(ConfigError, match="this is node 1 of a run on several machines, which only has trainer ranks"):
        machines.make_nodes(settings(tmp_path, node_rank=1, master_addr="127.0.0.1"), tmp_path)


def test_node_0_needs_an_address_that_this_machine_has(tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("NODE_RANK", "0")
    with pytest.raises(
        ConfigError, match="--actor-num-nodes 2 needs --master-addr, or the environment variable MASTER_ADDR"
    ):
        machines.make_nodes(settings(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"cannot listen for the other nodes at 192\.0\.2\.1:0"):
        machines.make_nodes(settings(tmp_path, master_addr="192.0.2.1"), tmp_path)


@pytest.mark.parametrize("by", ["flags", "environment"])
def test_a_node_joins_by_the_file_in_the_run_folder_and_ends_with_the_run(cluster, tmp_path, monkeypatch, by):
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    given = {"master_addr": "127.0.0.2", "master_port": port} if by == "flags" else {}
    monkeypatch.setenv("NODE_RANK", "0")
    if by == "environment":
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
        monkeypatch.setenv("MASTER_PORT", str(port))
    config = settings(tmp_path, **given)
    run = tmp_path / "run"
    run.mkdir()
    (run / "nodes.json").write_text(json.dumps({"host": "127.0.0.1", "port": 9, "secret": "00"}))  # of a run before
    cluster.nodes = machines.make_nodes(config, run)
    lines = []
    other = settings(tmp_path, node_rank=1)
    node = threading.Thread(target=machines.join_run, args=(other, run, lines.append), kwargs={"wait_s": 20.0})
    node.start()
    pool = cluster.pool()
    meeting = json.loads((run / "nodes.json").read_text())
    assert (meeting["host"], meeting["port"]) == ("127.0.0.2", port)
    assert (run / "nodes.json").stat().st_mode & 0o777 == 0o600
    assert [a["rank"] for a in ask(pool)] == [0, 1]
    pool.close()
    cluster.nodes.close()
    node.join(10)
    assert lines == [f"node 1 of 2 has joined the run in {run}", "the run has ended"]
    assert not (run / "nodes.json").exists()


def test_a_node_without_its_node_0_gives_up_in_time(tmp_path):
    with pytest.raises(
        ConfigError, match=r"node 1 waited 0\.2 s for .*nodes\.json, which node 0 writes: that file does not exist here"
    ):
        machines.join_run(settings(tmp_path, node_rank=1), tmp_path / "run", print, wait_s=0.2)
    with pytest.raises(
        ConfigError, match="--node-rank 1 finds its run by its folder, which all nodes share; give --run"
    ):
        machines.join_run(settings(tmp_path, node_rank=1), None, print)


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_node_whose_node_0_dies_ends_or_waits_for_it_to_start_again(cluster, tmp_path, tolerant):
    config = settings(tmp_path, master_addr="127.0.0.1", use_fault_tolerance=tolerant, node_rank=0)
    run, ended = tmp_path / "run", []
    run.mkdir()

    def join():
        try:
            machines.join_run(replace(config, train=replace(config.train, node_rank=1)), run, ended.append, wait_s=20.0)
        except WorkerError as e:
            ended.append(str(e))

    node = threading.Thread(target=join)
    node.start()
    cluster.nodes = machines.make_nodes(config, run)
    cluster.pool().close()
    (lost,) = cluster.nodes._nodes.values()
    cluster.nodes._listener._socket.shutdown(socket.SHUT_RDWR)  # as the death of node 0 does
    disconnect(lost._connection)
    if tolerant:
        cluster.nodes = machines.make_nodes(config, run)
        pool = cluster.pool()
        assert len(ask(pool)) == 2
        pool.close()
        cluster.nodes.close()
    node.join(20)
    assert not node.is_alive()
    assert ended[-1].startswith(
        "the run has ended" if tolerant else "node 0 is gone, or another process has this node's number"
    )


def test_the_supervisor_keeps_the_flags_of_a_node(tmp_path):
    train = settings(tmp_path, node_rank=0, master_addr="h", master_port=5).train
    assert machines.flags_of_node(train) == ["--node-rank", "0", "--master-addr", "h", "--master-port", "5"]
