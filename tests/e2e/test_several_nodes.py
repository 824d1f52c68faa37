"""A trainer on several machines gives the weights of one machine, to the bit. Here the machines are processes that share a folder."""

import os
import subprocess
import sys
import time

import orjson
import pytest
from ray_clusters import started
from run_state import state

pytestmark = pytest.mark.full
pytest.importorskip("megatron.core", reason="needs megatron-core")
WORDS = (
    "--env search_r1 --num-rollout 3 --rollout-batch-size 2 --n-samples-per-prompt 4 --save-interval 1 --seed 5 --eval-interval 0 "
    "--lr 1e-4 --concurrency 8 --engine-max-running 8 --threads 1"
).split()
AGENTRL = [sys.executable, "-m", "agentrl.cli", "train", *WORDS]


def equal(run, other):
    """Fail if metrics, episodes or weights differ. The fingerprint of the settings does: they name the machines."""
    metrics, episodes, weights = zip(state(run), state(other), strict=True)
    assert metrics[0] == metrics[1]
    assert weights[0] == weights[1]
    for mine, theirs in zip(*([orjson.loads(r) | {"config": None} for r in e] for e in episodes), strict=True):
        assert mine == theirs


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run folder of two ranks on this machine."""
    run = tmp_path_factory.mktemp("one") / "run"
    words = [*AGENTRL, "--run", str(run), "--actor-num-gpus-per-node", "2"]
    done = subprocess.run(words, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "metrics.jsonl").read_bytes().count(b"train/grad_norm") >= 2, (
        "the run must train, or equality says nothing"
    )
    return run


def two_nodes(tmp_path):
    """The flags of a run with a rank on each of two nodes."""
    (tmp_path / "weights").mkdir()
    sizes = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"]
    return [*sizes, "--update-weight-disk-dir", str(tmp_path / "weights")]


def test_the_same_command_on_two_nodes(one, tmp_path):
    command = [*AGENTRL, "--run", str(tmp_path / "two"), *two_nodes(tmp_path)]
    other = subprocess.Popen(command, env={**os.environ, "NODE_RANK": "1"}, stdout=subprocess.PIPE, text=True)
    environment = {**os.environ, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    first = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert other.wait(60) == 0
    assert other.stdout.read().endswith("the run has ended\n")
    other.stdout.close()
    equal(one, tmp_path / "two")


# -- ray -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster():
    """Two nodes for the ranks, and a spare one."""
    pytest.importorskip("ray")
    with started([1, 1, 1]) as cluster:
        yield cluster


def on_ray(cluster, tmp_path, *more):
    run = [*AGENTRL, "--run", str(tmp_path / "ray"), "--ray-address", cluster.address]
    return [*run, *two_nodes(tmp_path), *more]


def test_ranks_on_the_nodes_of_a_ray_cluster(one, cluster, tmp_path):
    done = subprocess.run(on_ray(cluster, tmp_path), timeout=900, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(one, tmp_path / "ray")


def test_a_node_that_dies_changes_no_bit(one, cluster, tmp_path):
    """After the first checkpoint the node of a rank dies, and its ranks start again on the spare one."""
    command = on_ray(cluster, tmp_path, "--use-fault-tolerance")
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 600
        while not (tmp_path / "ray/checkpoints/000001").exists():
            assert run.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        nodes = {r.node_id: r for r in cluster.worker_nodes}
        cluster.remove_node(nodes[node_of_a_rank(cluster)], allow_graceful=False)
        assert run.wait(900) == 0, (tmp_path / "out").read_text()
    text = (tmp_path / "out").read_text()
    assert "the trainer's ranks are started again" in text
    assert "the trainer continues from" in text
    equal(one, tmp_path / "ray")


def node_of_a_rank(cluster):
    """Asked in another process: a driver in this one would stay connected."""
    program = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')\n"
        "groups = [g for g in ray.util.placement_group_table().values() if g['state'] == 'CREATED']\n"
        "print(list(groups[0]['bundles_to_node_id'].values())[0])"
    )
    words = [sys.executable, "-c", program, cluster.address]
    return subprocess.run(words, timeout=120, capture_output=True, text=True, check=True).stdout.split()[-1]
