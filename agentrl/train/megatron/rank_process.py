"""One trainer rank as a process: `python -m agentrl.train.megatron.rank_process FD PARENT`, started by rank_pool.py.

It receives (command, keyword arguments) over the inherited socket FD, "start" with a `RankSetup` first, of several adapters with the `adapter` that
it is for, and answers each with ("ok", result),
("usage", UsageError or StoreError), ("machine", OSError) or ("error", traceback). It ends when the socket
closes, and whenever its parent is gone.
"""

from __future__ import annotations

import datetime
import random
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from agentrl.core.child_process import exit_now, exit_with_parent
from agentrl.core.machine_errors import machine_error
from agentrl.errors import StoreError, UsageError
from agentrl.train.megatron.rank_pool import RankSetup


def join_process_group(setup: RankSetup) -> None:
    """Set threads, device, process groups and seeds. Imports torch, then the CPU shim, then megatron: the order matters."""
    import numpy as np
    import torch

    from agentrl.train.megatron import cpu_shim, gpu_kernels

    torch.set_num_threads(setup.threads)
    cpu_shim.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    gpu_kernels.install()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(setup.local_rank)
    distributed: Any = torch.distributed
    limit = datetime.timedelta(seconds=120)
    store = distributed.TCPStore(setup.host, setup.port, setup.world, setup.rank == 0, limit)
    distributed.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=setup.rank,
        world_size=setup.world,
        timeout=datetime.timedelta(seconds=setup.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setup.megatron.get("tensor_model_parallel_size", 1),
        pipeline_model_parallel_size=setup.megatron.get("pipeline_model_parallel_size", 1),
        context_parallel_size=setup.megatron.get("context_parallel_size", 1),
        expert_model_parallel_size=setup.megatron.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=setup.megatron.get("expert_tensor_parallel_size"),
        distributed_timeout_minutes=setup.timeout_s / 60,  # megatron makes a timedelta of it
    )
    random.seed(setup.seed)
    np.random.seed(setup.seed % 2**32)
    torch.manual_seed(setup.seed)
    model_parallel_cuda_manual_seed(setup.seed)


def serve(connection: Connection) -> None:
    """Execute commands until the connection closes."""
    rank: Any = None
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        reply: tuple[str, Any]
        try:
            if command == "start":
                join_process_group(arguments["setup"])
                from agentrl.train.megatron.rank import TrainerRank

                rank = TrainerRank(arguments["setup"])
                reply = ("ok", rank.info)
            else:
                if (adapter := arguments.pop("adapter", None)) is not None:
                    rank.select(adapter)
                reply = ("ok", getattr(rank, command)(**arguments))
        except (UsageError, StoreError) as e:
            reply = ("usage", e)
        except BaseException as e:  # noqa: BLE001, the controller raises it; torch's CheckpointException is not an Exception
            error = machine_error(e)
            reply = ("error", traceback.format_exc()) if error is None else ("machine", error)
            traceback.print_exc()
        try:
            connection.send(reply)
        except OSError:
            return


def main(argv: list[str]) -> None:
    """Serve on the file descriptor argv[1], as a child of the process argv[2]."""
    exit_with_parent(int(argv[2]))
    serve(Connection(int(argv[1])))
    exit_now()  # torch's process groups are not destroyed: the other ranks may be gone


if __name__ == "__main__":
    main(sys.argv)
