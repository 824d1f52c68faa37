"""Run `agentrl`, and kill it with SIGKILL at a given moment: `drive.py WHEN STEP WORDS…`, WHEN = never | rollout | train.

Without arguments it serves jobs in forks of one process (forked_jobs.py) that has imported what training needs.
"""

import asyncio
import importlib
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from forked_jobs import serve

from agentrl.cli.main import main
from agentrl.rollout.episode import EpisodeRunner
from agentrl.train.megatron.trainer import MegatronTrainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_rollout(ordinal: int) -> None:
    """Die when the episode with this ordinal is finished, while others of its group run."""
    run = EpisodeRunner.run

    async def dying(self, spec):
        trajectory = await run(self, spec)
        if spec.index == ordinal and not spec.prefix:
            die()
        await asyncio.sleep(0)
        return trajectory

    EpisodeRunner.run = dying


def kill_in_train(number: int) -> None:
    """Die during the trainer's step with this number."""
    step, calls = MegatronTrainer.step, [0]

    def dying(self, rows, loss, lr):
        calls[0] += 1
        if calls[0] < number:
            return step(self, rows, loss, lr)
        sent = threading.Event()
        connection = self.pool.connections[0]
        send = type(connection).send

        def noted(conn, message):
            send(conn, message)
            sent.set()

        type(connection).send = noted
        threading.Thread(target=step, args=(self, rows, loss, lr), daemon=True).start()
        sent.wait(60)
        return die()

    MegatronTrainer.step = dying


def run(when: str, at: int, words: list[str]) -> int:
    if when == "rollout":
        kill_in_rollout(at)
    elif when == "train":
        kill_in_train(at)
    return main(words)


def serve_runs() -> None:
    """A job has "when", "at" and "words"."""
    for module in (
        "agentrl.engine.local.engine",
        "agentrl.run.training",
        "matplotlib.pyplot",
        "torch.utils.tensorboard",
    ):
        importlib.import_module(module)
    serve(lambda job: run(job["when"], job["at"], job["words"]))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve_runs()
    else:
        sys.exit(run(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
