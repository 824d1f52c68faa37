"""A trainer on several machines gives the weights of one machine, to the bit. Here the machines are processes that share a folder."""

import os
import subprocess
import sys

import pytest
from run_state import equal

pytestmark = pytest.mark.full
pytest.importorskip("megatron.core", reason="needs megatron-core")
WORDS = (
    "--env search_r1 --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --save-interval 1 --seed 5 --eval-interval 0 "
    "--lr 1e-4 --concurrency 8 --engine-max-running 8 --threads 1"
).split()
AGENTRL = [sys.executable, "-m", "agentrl.cli", "train", *WORDS]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run folder of two ranks on this machine."""
    run = tmp_path_factory.mktemp("one") / "run"
    words = [*AGENTRL, "--run", str(run), "--actor-num-gpus-per-node", "2"]
    done = subprocess.run(words, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "metrics.jsonl").read_bytes().count(b"train/grad_norm") == 2, (
        "the run must train, or equality says nothing"
    )
    return run


def test_the_same_command_on_two_nodes(one, tmp_path):
    (tmp_path / "weights").mkdir()
    words = [
        "--actor-num-nodes",
        "2",
        "--actor-num-gpus-per-node",
        "1",
        "--update-weight-disk-dir",
        str(tmp_path / "weights"),
    ]
    command = [*AGENTRL, "--run", str(tmp_path / "two"), *words]
    other = subprocess.Popen(command, env={**os.environ, "NODE_RANK": "1"}, stdout=subprocess.PIPE, text=True)
    environment = {**os.environ, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    first = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert other.wait(60) == 0
    assert other.stdout.read().endswith("the run has ended\n")
    other.stdout.close()
    equal(one, tmp_path / "two")
