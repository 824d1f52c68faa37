"""Training runs continue bit-equal, or start again by the same command, after a power loss; see power_loss.py and kills.py."""

import pickle
from random import Random

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from kills import FLAVOURS, WORDS, Forks, again, first_difference
from power_loss import disk_after
from run_state import state

CASES = 10
"""of each flavour"""


@pytest.mark.full
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_training_run_continues_bit_equal_after_a_power_loss(tmp_path, flavour):
    ranks, flags = FLAVOURS[flavour]
    forks, disk, run, file = Forks(tmp_path), tmp_path / "disk", tmp_path / "disk/runs/first", tmp_path / "log"
    words = [*WORDS, *flags, "--run", run]
    disk.mkdir()
    try:
        whole = forks.run(words, ranks, record=[str(disk), str(file)])
        assert whole["status"] == 0, whole["output"][-2000:]
        log, equal = pickle.loads(file.read_bytes()), state(run)
        for seed in range(CASES):
            disk.rename(tmp_path / f"before{seed}")
            events = disk_after(log, Random(seed), disk)
            resumed = forks.run(again(words, run), ranks)
            assert resumed["status"] == 0, f"seed {seed}, after {events} events: {resumed['output'][-1500:]}"
            for mine, theirs, what in zip(state(run), equal, ("metrics", "episodes", "weights"), strict=True):
                assert mine == theirs, f"seed {seed}, after {events} events: {what}: {first_difference(mine, theirs)}"
    finally:
        forks.close()
