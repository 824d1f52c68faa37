"""Kill -9 at seeded moments of training runs, then resume: `python tests/e2e/kills.py --count 100 [--seed 0] [--out FILE]`.

Each case kills a run (some twice: the resumption too) and then continues it by `--resume`, or by the same command where it left no run folder.
It must equal a run that was never killed, to the bit. No process may be left 10 s after a kill, and nothing in shared memory at the end.

`--minutes M` starts no case later than that. The cases of several calls with one `--out` are merged: `--count 100 --out FILE` plays those of the
seeds 0 to 99 that the file lacks. `--flavours sglang` plays runs with a genuine SGLang server on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from forked_jobs import ForkedJobs  # noqa: E402
from processes import MARK  # noqa: E402
from run_state import state  # noqa: E402

from agentrl.engine.sglang.shared_memory import mapped_files  # noqa: E402

ROLLOUTS, EPISODES = 3, 4
"""of a run, and of each rollout"""
WORDS = (
    f"train --env search_r1 --num-rollout {ROLLOUTS} --rollout-batch-size 2 --n-samples-per-prompt 2 --save-interval 1 --seed 5 --eval-interval 2 "
    "--eval-limit 2 --lr 1e-4 --concurrency 4 --tensorboard false --max-turns 2 --rollout-max-response-len 300 --entropy-coef 0.01 --threads 1"
).split()
LOCAL = ("--engine-max-running", "4")
FLAVOURS = {
    "one rank": (1, [*LOCAL, "--actor-num-gpus-per-node", "1"]),
    "one rank, --async-save": (1, [*LOCAL, "--actor-num-gpus-per-node", "1", "--async-save", "true"]),
    "two ranks": (2, [*LOCAL, "--actor-num-gpus-per-node", "2"]),
}
"""ranks, and flags"""
SGLANG = {
    "sglang": (1, ["--actor-num-gpus-per-node", "1", "--engine", "sglang", "--weight-sync", "disk"]),
    "sglang, colocated": (1, ["--actor-num-gpus-per-node", "1", "--engine", "sglang", "--weight-sync", "colocated"]),
}
"""runs with a genuine server on the CPU, where its samples do not follow from a seed: the runs must be complete, not equal"""
GRACE_S, WATCH_S = 10.0, 1.0
MEMORY = Path("/dev/shm")


class Forks:
    """The process whose forks are the runs."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"kills-{os.getpid()}-{time.time_ns()}"
        self.memory = Path(tempfile.mkdtemp(prefix="agentrl-kills-", dir=MEMORY))
        """what the runs use as shared memory: other programs on the machine have folders of weights there too"""
        self.mapped = set()
        """files in shared memory that processes of runs mapped"""
        env = os.environ | {"OMP_NUM_THREADS": "1", MARK: self.mark, "KILLS_MEMORY": str(self.memory)}
        self.jobs = ForkedJobs(Path(__file__).with_name("forked_runs.py"), env)
        self.folder = folder
        self.own = {self.jobs.process.pid, self.jobs.greeting}
        """the process itself, and the one whose forks are the ranks"""

    def run(self, words, ranks, kill=None, record=None):
        """Run a command; what became of it, with its output. `record`: the folder whose changes are recorded, and the file of the record."""
        output = str(self.folder / "output.txt")
        done = threading.Event()
        watch = threading.Thread(target=self.watch, args=[done])
        watch.start()
        job = {"words": [*map(str, words)], "ranks": ranks, "kill": kill, "record": record, "output": output}
        try:
            answer = self.jobs.run(job)
        finally:
            done.set()
            watch.join()
        seen = [json.loads(line[5:]) for line in answer["output"].splitlines() if line.startswith("SEEN ")]
        return answer | (seen[-1] if seen else {})

    def running(self):
        """The processes of runs that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in self.own:
                continue
            try:
                mine = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if mine and not zombie:
                found.append(int(entry.name))
        return found

    def watch(self, done):
        """Note what processes of a run map in shared memory."""
        while not done.wait(WATCH_S):
            self.mapped |= mapped_files(self.running())

    def orphans(self):
        """Those that are there after the grace."""
        return lasting(self.running)

    def left_in_memory(self):
        """What the runs, which have ended, left in shared memory: weights, and what a process of theirs mapped (torch's and SGLang's files)."""
        return [*self.memory.iterdir(), *(file for file in self.mapped if file.exists())]

    def end_runs(self):
        """Kill what still runs, of a run that was interrupted; returns it."""
        for pid in (running := self.running()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return running

    def close(self):
        lasting(self.end_runs)
        self.jobs.close()
        shutil.rmtree(self.memory)


def lasting(look):
    """What is still seen after the grace."""
    deadline = time.monotonic() + GRACE_S
    while (seen := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


def draw_moment(random, whole):
    """A moment of a kill, given what the whole run took."""
    kind = random.choice(["time", "time", "event", "event", "inside", "rank"])
    if kind == "time":
        return kind, {"after_s": random.random() * whole["seconds"]}
    if kind == "event":
        return kind, {"event": random.randint(1, whole["events"])}
    name = random.choice(sorted(whole["calls"]))  # of the trainer, the weight sync, the run folder or the run
    moment = {"inside": name, "call": random.randint(1, whole["calls"][name]), "after_s": random.random() * 0.15}
    return kind, moment | ({"rank": True} if kind == "rank" else {})


def stage_of(run):
    """How far a killed run came, by what it left."""
    if not run.exists():
        return "no run folder"
    if (run / "summary.json").exists():
        return "ended"
    names = [p.name for p in (run / "checkpoints").iterdir()] if (run / "checkpoints").exists() else []
    if any(name.startswith(".") for name in names):
        return "amid a checkpoint"
    done = [name for name in names if name.isdigit()]
    return f"after {int(max(done))} rollouts" if done else "before the first checkpoint"


def kill_once(forks, words, ranks, run, moment):
    """Kill a run; the stage that it reached, or None if it ended before."""
    ended = forks.run(words, ranks, moment)
    orphans = forks.orphans()
    assert not orphans, f"processes {orphans} run {GRACE_S:g} s after the kill"
    if ended["status"] == 0:
        return None
    by_kill = ended["status"] == -9 or (moment.get("rank") and ended["status"] == 1)
    assert by_kill, f"status {ended['status']}: {ended['output'][-1500:]}"
    return stage_of(run)


def again(words, run):
    """The command that continues a killed run."""
    return ["train", "--resume", run] if (run / "config.toml").exists() else words


def play_case(forks, folder, seed, wholes, equals):
    """One case; returns its facts. AssertionError: what a user would lose."""
    random = Random(seed)
    flavour = random.choice([*wholes])
    ranks, flags = (FLAVOURS | SGLANG)[flavour]
    run = folder / f"run{seed}"
    words = [*WORDS, *flags, "--run", run]
    kinds, stages, command = [], [], words
    for _ in range(2 if random.random() < 0.25 else 1):
        kind, moment = draw_moment(random, wholes[flavour])
        kinds.append(kind)
        stages.append(kill_once(forks, command, ranks, run, moment) or "ended before the kill")
        command = again(words, run)
    resumed = forks.run(command, ranks)
    assert resumed["status"] == 0, f"{command[:3]}: {resumed['output'][-1500:]}"
    if flavour in SGLANG:
        require_complete(run)
    else:
        for mine, theirs, what in zip(state(run), equals[flavour], ("metrics", "episodes", "weights"), strict=True):
            assert mine == theirs, f"{flavour}, {kinds}, {stages}: the {what} differ: {first_difference(mine, theirs)}"
    temporary = [*run.glob(".*"), *(run / "checkpoints").glob(".*")]
    assert not temporary, f"temporary files are left: {temporary}"
    left = lasting(forks.left_in_memory)
    assert not left, f"left in shared memory: {left}"
    shutil.rmtree(run)
    return {"flavour": flavour, "moments": kinds, "stages": stages}


def require_complete(run):
    """Each rollout is there once, with all its episodes, on the weights of its version, and trained and synced."""
    metrics, recorded, _ = state(run)
    rows = [row for row in map(json.loads, metrics.splitlines()) if "policy_version" in row]
    assert [(row["step"], row["policy_version"]) for row in rows] == [(n, n + 1) for n in range(ROLLOUTS)], rows
    assert all(row["exactness_violations"] == 0 and row["episodes"] == EPISODES for row in rows)
    assert all(row["sync/log_prob_diff_max"] < 1e-4 and row["train/rollout_log_prob_diff_max"] < 1e-4 for row in rows)
    trained = Counter(record["step"] for record in map(json.loads, recorded) if record["split"] == "train")
    assert trained == dict.fromkeys(range(ROLLOUTS), EPISODES), f"recorded episodes by rollout: {trained}"


def first_difference(mine, theirs):
    """The first line, record or file that differs, in both runs."""
    if isinstance(mine, bytes):
        mine, theirs = mine.splitlines(), theirs.splitlines()
    if isinstance(mine, dict):
        return sorted(mine.keys() ^ theirs.keys()) or [name for name in mine if mine[name] != theirs[name]]
    pairs = ((a, b) for a, b in zip(mine, theirs, strict=False) if a != b)
    return next(pairs, f"{len(mine)} and {len(theirs)} of them")


def whole_runs(forks, folder, flavours):
    """What each flavour takes, and what it leaves."""
    wholes, equals = {}, {}
    for number, flavour in enumerate(flavours):
        ranks, flags = (FLAVOURS | SGLANG)[flavour]
        run = folder / f"whole{number}"
        wholes[flavour] = forks.run([*WORDS, *flags, "--run", run], ranks)
        assert wholes[flavour]["status"] == 0, wholes[flavour]["output"][-2000:]
        equals[flavour] = state(run)
        trained = [row for row in map(json.loads, equals[flavour][0].splitlines()) if row.get("train/grad_norm")]
        assert len(trained) >= 2, "the run must train, or equality says nothing"
        assert all(row["train/rollout_log_prob_diff_max"] < 1e-3 for row in trained), "engine and trainer must agree"
    return wholes, equals


def play_cases(seeds, folder, *, flavours=FLAVOURS, until=None):
    """Play cases, none after the time `until`; yields each seed with the facts of its case, or its fault."""
    forks = Forks(folder)
    try:
        wholes, equals = whole_runs(forks, folder, flavours)
        for seed in seeds:
            if until is not None and time.monotonic() > until:
                break
            try:
                case = play_case(forks, folder, seed, wholes, equals)
            except AssertionError as e:
                case = {"fault": str(e)}
            yield seed, case
    finally:
        forks.close()


def recorded_cases(out):
    """The cases without a fault that a record holds, by seed."""
    cases = json.loads(out.read_text())["cases"] if out and out.exists() else {}
    return {int(seed): case for seed, case in cases.items() if "fault" not in case}


def record_of(cases, count):
    """The record of all cases."""
    from benchmarks.result_record import result_record

    killed = [case for case in cases.values() if "fault" in case or set(case["stages"]) != {"ended before the kill"}]
    good = [case for case in killed if "fault" not in case]
    stages = Counter(s for c in good for s in c["stages"])
    return result_record(
        "killed runs that continued bit-equal (with SGLang: complete)", len(good), len(killed), f"python tests/e2e/kills.py --count {count}",
        kills=stages.total() - stages["ended before the kill"], cores=os.cpu_count(),
        load_average=round(os.getloadavg()[0], 1),
        flavours=Counter(c["flavour"] for c in good), moments=Counter(m for c in good for m in c["moments"]),
        stages=dict(sorted(stages.items())),
        cases={str(seed): cases[seed] for seed in sorted(cases)},
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no case after this time")
    parser.add_argument("--out", type=Path, help="file of the record, which keeps the cases that it has")
    parser.add_argument(
        "--flavours", nargs="+", choices=[*FLAVOURS, *SGLANG], default=[*FLAVOURS], help="what the seeds choose from"
    )
    args = parser.parse_args()
    started = time.monotonic()
    cases = recorded_cases(args.out)
    seeds = [seed for seed in range(args.seed, args.seed + args.count) if seed not in cases]
    until = started + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for seed, case in play_cases(seeds, Path(folder), flavours=args.flavours, until=until):
            print(f"{seed}: {case}", flush=True)
            cases[seed] = case
            if args.out:
                args.out.write_text(json.dumps(record_of(cases, args.count), indent=2) + "\n")
    print(json.dumps(record_of(cases, args.count) | {"cases": len(cases)}, indent=2))
    sys.exit(any("fault" in case for case in cases.values()))


if __name__ == "__main__":
    main()
