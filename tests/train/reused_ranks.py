"""Rank processes that serve several trainers, one after the other, each in its own layout: importing torch and megatron takes longest.

`python -m reused_ranks FD PARENT` is one rank; `reused_ranks` makes MegatronTrainer use a pool of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from agentrl.train.megatron import rank_process
from agentrl.train.megatron.rank_pool import RankPool, RankSetup


class ReusedRanks(RankPool):
    """Ranks that stay when a trainer closes."""

    module = "reused_ranks"

    def close(self, grace_s: float = 5.0) -> None:
        """Stop them only after a failure."""
        if grace_s == 0:
            super().close(grace_s)


@contextmanager
def reused_ranks(world: int, folder: Path) -> Iterator[None]:
    """Trainers started inside use the same `world` processes."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=path):
        pool = ReusedRanks(world, folder, 1)
    try:
        with patch("agentrl.train.megatron.trainer.RankPool", lambda *_: pool):
            yield
    finally:
        RankPool.close(pool)


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
