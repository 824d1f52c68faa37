"""One trainer rank as a process: `python -m agentrl.train.megatron.rank_process FD`, started by `processes.py`, never by hand.

It speaks over an inherited socket: first it gets a `Setup`, then (command, keyword arguments) one after the other, and answers each with
("ok", result), ("usage", UsageError) or ("error", traceback). It ends when the socket closes and when its parent is gone,
whatever it is doing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from agentrl.errors import UsageError
from agentrl.train.megatron.megatron_settings import Setup


def join(setup: Setup) -> None:
    """Set threads, device and process groups up. Imports torch and megatron, the CPU's stand-ins first."""
    import datetime
    import random

    import numpy as np
    import torch

    from agentrl.train.megatron import cpu_shim as cpu

    torch.set_num_threads(setup.threads)
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(setup.local_rank)
    distributed: Any = torch.distributed
    limit = datetime.timedelta(seconds=setup.timeout_s)
    store = distributed.TCPStore("127.0.0.1", setup.port, setup.world, setup.rank == 0, datetime.timedelta(seconds=120))
    backend = "nccl" if gpu else "gloo"
    distributed.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world, timeout=limit)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setup.megatron.get("tensor_model_parallel_size", 1),
        pipeline_model_parallel_size=setup.megatron.get("pipeline_model_parallel_size", 1),
        distributed_timeout_minutes=max(1, int(setup.timeout_s // 60)),
    )
    random.seed(setup.seed)
    np.random.seed(setup.seed % 2**32)
    torch.manual_seed(setup.seed)
    model_parallel_cuda_manual_seed(setup.seed)


def serve(connection: Connection) -> None:
    """Answer commands until the end of the stream."""
    target: Any = None
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if command == "start":
                join(arguments["setup"])
                from agentrl.train.megatron.rank import TrainerRank

                target = TrainerRank(arguments["setup"])
                answer = target.place
            else:
                answer = getattr(target, command)(**arguments)
            reply = ("ok", answer)
        except UsageError as e:
            reply = ("usage", e)
        except BaseException:  # noqa: BLE001, whatever it is (torch's CheckpointException is no Exception), the controller raises it
            reply = ("error", traceback.format_exc())
            traceback.print_exc()
        try:
            connection.send(reply)
        except OSError:
            return


def _watch_parent(parent: int) -> None:
    """End at once when the controller is gone: a rank may be deep in a collective that never returns."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _leave()


def _leave() -> None:
    """End, and with us what we started: megatron keeps a process that writes checkpoints, which would stay for ever. A rank leads a group."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)  # process groups of torch are not torn down politely: the other ranks may be gone


def main(argv: list[str]) -> None:
    """Serve on the inherited file descriptor argv[1], as the child of process argv[2]."""
    threading.Thread(target=_watch_parent, args=(int(argv[2]),), daemon=True).start()
    serve(Connection(int(argv[1])))
    _leave()


if __name__ == "__main__":
    from agentrl.train.megatron import rank_process as worker

    worker.main(sys.argv)
