"""Rank processes that serve several trainers, one after the other, each in its own layout: importing torch and megatron takes longest.

`python -m reused_ranks FD PARENT` is one rank; with the fixture `reused_ranks` trainers use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from agentrl.train.megatron import rank_process
from agentrl.train.megatron.rank_place import ConnectedRank
from agentrl.train.megatron.rank_pool import RankPool, RankSetup

TRAINERS = 12
"""of a rank; each process group leaves a thread of gloo behind, which wakes up many times a second"""


class RankStock:
    """The ranks that wait for their next trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.idle: list[tuple[ConnectedRank, Path, int]] = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Trainers that start inside take ranks of the stock, and return them when they close."""
        with patch("agentrl.train.megatron.trainer.RankPool", lambda places, *_: ReusedRanks(self, len(places))):
            yield

    def close(self) -> None:
        RankPool.close(ReusedRanks(self, len(self.idle)))


class ReusedRanks(RankPool):
    """Ranks that stay when a trainer closes, except after a failure and after `TRAINERS` trainers."""

    def __init__(self, stock: RankStock, world: int) -> None:
        taken = [stock.idle.pop() for _ in range(min(world, len(stock.idle)))]
        stock.started += 1
        self.stock, self.trainers = stock, [1] * (world - len(taken))
        super().__init__([NewRank()] * (world - len(taken)), stock.folder / str(stock.started), 1)
        for process, log, trainers in taken:
            self.processes.append(process)
            self.connections.append(process.connection)
            self.logs.append(log)
            self.trainers.append(trainers + 1)

    def close(self, grace_s: float = 5.0) -> None:
        ranks = [] if grace_s == 0 else list(zip(self.processes, self.logs, self.trainers, strict=False))
        kept = [rank for rank in ranks if rank[2] < TRAINERS]
        self.stock.idle += kept
        for process, *_ in kept:
            self.processes.remove(process)
            self.connections.remove(process.connection)
        super().close(grace_s)


class NewRank:
    """Starts a rank that can be used again."""

    def start(self, rank: int, log: Path, threads: int) -> ConnectedRank:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with patch.dict(os.environ, PYTHONPATH=path):
            return ConnectedRank(log, threads, "reused_ranks")


def join_again(setup: RankSetup) -> None:
    """Leave the process group of the trainer before, if there was one, and join that of the next."""
    import torch

    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    join_process_group(setup)


join_process_group = rank_process.join_process_group
if __name__ == "__main__":
    rank_process.join_process_group = join_again
    rank_process.main(sys.argv)
