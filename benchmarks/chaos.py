"""Kills processes of a training run with SIGKILL at random, and compares what becomes of it with a run that nobody disturbs.

    python benchmarks/chaos.py --kills 5          search_r1 on the local engine; writes benchmarks/results/chaos_cpu.json

The victims are the controller, which holds the engine and the episodes, and the trainer's ranks. The run has `--use-fault-tolerance`. At its end
metrics, episodes and weights must be those of the other run, bit for bit: then every episode is accounted for. A kill costs what the start of a
controller or a rank costs: seconds of CPU time for imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compare_runs import differences, fingerprint
from result_record import result_record

from agentrl.core.child_process import children_of, signal_session
from agentrl.store.checkpoints import checkpoints

RESULT = Path(__file__).parent / "results" / "chaos_cpu.json"
WORDS = (
    "--env search_r1 --rollout-batch-size 2 --n-samples-per-prompt 4 --save-interval 1 --eval-interval 0 --lr 1e-4 --seed 5 --tensorboard false "
    "--max-turns 2 --entropy-coef 0.01"
)
LATEST_S = 1.5
"""a kill comes at a random moment so long after a checkpoint"""

TIMEOUT_S = 600.0
"""between a kill and the checkpoint after it"""
POLL_S = 0.05


class Chaos:
    """The processes of a run.

    Args:
        supervisor: the process of the command.
        run: its run folder.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], run: Path) -> None:
        self.supervisor, self.run = supervisor, run

    def pids(self, kind: str) -> list[int]:
        """The living processes of a kind: controller or rank."""
        controllers = children_of(self.supervisor.pid)
        if kind == "controller":
            return [pid for pid in controllers if _runs(pid, "agentrl.cli")]
        return [pid for c in controllers for pid in children_of(c) if _runs(pid, "rank_process")]

    def kill(self, kind: str, *, after_rollouts: int = 0, delay_s: float = 0.0) -> int:
        """Kill a process of a kind once so many rollouts are in a checkpoint, and a time later; returns its id, or 0 if the run has ended before."""
        deadline, due = time.monotonic() + TIMEOUT_S, None
        while self.supervisor.poll() is None:
            if due is None and self.rollouts() >= after_rollouts:
                due = time.monotonic() + delay_s
            pids = self.pids(kind) if due is not None and time.monotonic() >= due else []
            if pids:
                os.kill(pids[0], signal.SIGKILL)
                return pids[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind} after {after_rollouts} rollouts within {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return 0

    def rollouts(self) -> int:
        """Rollouts in the last checkpoint."""
        found = checkpoints(self.run)
        return int(found[-1].name) if found else 0


def _runs(pid: int, what: str) -> bool:
    """Whether a living process runs a module."""
    try:
        return what in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return False


@contextmanager
def started(run: Path, rollouts: int, ranks: int, output: Path, *further: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run, whose output goes into a file. None of its processes outlives the block."""
    words = [*WORDS.split(), "--run", str(run), "--num-rollout", str(rollouts), *further]
    words += ["--actor-num-gpus-per-node", str(ranks)]
    command = [sys.executable, "-m", "agentrl.cli", "train", *words]
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        signal_session(process.pid, signal.SIGKILL)
        process.wait()


def disturb(chaos: Chaos, kills: int, chance: random.Random) -> Counter[str]:
    """Kill processes, each a random time after a checkpoint that followed the kill before; returns the kills by kind."""
    done: Counter[str] = Counter()
    kinds = (["controller", "rank"] * kills)[:kills]
    chance.shuffle(kinds)
    for kind in kinds:
        pid = chaos.kill(kind, after_rollouts=chaos.rollouts() + 1, delay_s=chance.uniform(0.0, LATEST_S))
        if not pid:
            break
        done[kind] += 1
        print(f"kill {done.total()} of {kills}: {kind} {pid} after {chaos.rollouts()} rollouts", flush=True)
    return done


def main() -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the record")
    args = parser.parse_args()
    rollouts = 2 * args.kills + 3
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with started(folder / "whole", rollouts, args.ranks, folder / "whole.out") as whole:
            if whole.wait():
                raise SystemExit((folder / "whole.out").read_text())
        begin = time.perf_counter()
        with started(folder / "run", rollouts, args.ranks, folder / "run.out", "--use-fault-tolerance") as process:
            kills = disturb(Chaos(process, folder / "run"), args.kills, random.Random(args.seed))
            status = process.wait()
        if status:
            raise SystemExit((folder / "run.out").read_text())
        seconds = time.perf_counter() - begin
        mine = fingerprint(folder / "run")
        found = differences(mine, fingerprint(folder / "whole"))
        episodes = sum(int(row["episodes"]) for row in mine["metrics"])
    print(
        f"{kills.total()} kills ({dict(kills)}), {episodes} episodes in {rollouts} rollouts, {seconds:.0f} s: {found or 'equal, bit for bit'}"
    )
    command = f"python benchmarks/chaos.py --kills {args.kills} --ranks {args.ranks} --seed {args.seed}"
    details = {"kills": dict(kills), "episodes": episodes, "seconds": round(seconds, 1), "differences": found}
    record = result_record("kills_survived", kills.total(), args.kills, command, cores=os.cpu_count(), **details)
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if not found and kills.total() == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
