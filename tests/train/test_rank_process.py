"""A rank whose controller was killed leaves nothing behind; its collective operations have a time limit."""

import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import pytest
from processes import read_line

from agentrl.train.megatron import rank_process
from agentrl.train.megatron.rank_pool import RankPool

RANK = """
import os, subprocess, sys
import time
from agentrl.core.child_process import exit_with_parent
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])  # as megatron keeps one
controller = os.getppid()  # before it can be gone
print(os.getpid(), helper.pid, flush=True)
exit_with_parent(controller)
time.sleep(300)
"""
CONTROLLER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True).wait()
"""


def gone(pid: int) -> bool:
    """It has ended (a zombie has)."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_controller_takes_ranks_and_their_helpers_along():
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, RANK], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    pids = [int(p) for p in read_line(controller).split()]
    try:
        assert len(pids) == 2
        assert not any(map(gone, pids))
        controller.kill()
        controller.wait()
        deadline = time.monotonic() + 20
        while not all(map(gone, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(gone, pids))
    finally:
        controller.stdout.close()
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_an_error_of_the_machine_in_a_rank_is_raised_as_it_is(monkeypatch):
    def fail(setup):
        raise RuntimeError("[enforce fail at device.cc:186] rv != -1. -1 vs -1. Too many open files")

    monkeypatch.setattr(rank_process, "join_process_group", fail)
    ours, theirs = Pipe()
    rank = Thread(target=rank_process.serve, args=(theirs,))
    rank.start()
    ours.send(("start", {"setup": None}))
    pool = object.__new__(RankPool)
    pool.connections = [ours]
    with pytest.raises(OSError, match="in rank 0 of the trainer") as e:
        pool._receive("start", 0)
    assert e.value.errno == errno.EMFILE
    ours.close()
    rank.join(10)
    assert not rank.is_alive()


GROUPS = """
from pathlib import Path
from agentrl.core.ports import free_port
from agentrl.train.megatron.rank_pool import RankSetup
from agentrl.train.megatron.rank_process import join_process_group
off = dict(reference=False, tree_packing=True, critic=False, lora=None, true_on_policy=False)
join_process_group(RankSetup(
    model=Path("m"), megatron={}, dtype="float32", **off, seed=0, threads=1, rank=0, local_rank=0, world=1, host="127.0.0.1",
    port=free_port(), timeout_s=45.0
))
import torch
from megatron.core import parallel_state as p
groups = torch.distributed.group.WORLD, p.get_data_parallel_group(), p.get_tensor_model_parallel_group(), p.get_model_parallel_group()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(*{group._get_backend(device).options._timeout.total_seconds() for group in groups})
"""


@pytest.mark.slow
def test_the_time_limit_of_collective_operations_holds_in_every_process_group():
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    done = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "45.0\n", done.stderr[-2000:]
