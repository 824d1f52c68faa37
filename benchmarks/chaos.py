"""Kills processes of training runs with SIGKILL at random moments, and checks that no episode is lost or counts twice and that the weights are right.

    python benchmarks/chaos.py --count 100 --minutes 9 --out FILE      search_r1 on CPUs; continues the record in FILE until it has 100 kills

Each run has several kills. Its flavour says where its parts are, what is killed, and what must be true at its end:

| flavour | parts | victims | at the end |
|---|---|---|---|
| local | the local engine in the controller | controller, rank | bit-equal |
| servers | two servers, two runner processes | controller, rank, runner | bit-equal |
| engines | the same | controller, rank, runner, engine | accounted, replayed |
| async | the local engine, `--schedule async` | controller, rank | accounted, replayed |
| ray | rank and runner processes are actors on three raylets | controller, rank, runner, raylet | bit-equal |
| all | rank, runner processes and two servers on three raylets | controller, rank, runner, engine, raylet | accounted, replayed |

*Bit-equal*: metrics, episodes and weights are those of a run that nobody disturbs (of ray: a run without ray). *Accounted*: every rollout is there
once, with each of its episodes once, on weights of the next version, without a violation of exactness. *Replayed*: `--train-only` on the record gives
the weights of the run, bit for bit. An episode that an engine loses is played again as another attempt, which has other seeds, so such a run cannot
equal another.

Servers are benchmarks/local_server.py: the local engine behind SGLang's API. Every run has `--use-fault-tolerance`: the controller is resumed by its
supervisor, the rest goes on by itself. Without ray the last two flavours are left out, and the record says so. A kill costs what the start of a
process costs: seconds of CPU time for imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compare_runs import differences, fingerprint
from result_record import result_record

from agentrl.core.child_process import signal_session
from agentrl.core.ports import free_port
from agentrl.store import read_records
from agentrl.store.checkpoints import checkpoints

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))
RESULT = HERE / "results" / "chaos_cpu.json"
GROUPS, SAMPLES = 2, 4
WORDS = (
    f"--env search_r1 --rollout-batch-size {GROUPS} --n-samples-per-prompt {SAMPLES} --save-interval 1 --eval-interval 0 --lr 1e-4 --seed 5 "
    "--tensorboard false --max-turns 2 --entropy-coef 0.01"
)
MARK = "AGENTRL_CHAOS_RUN"
LATEST_S = 1.0
"""a kill comes at a random moment so long after a checkpoint"""
ROLLOUTS_PER_KILL = 6
"""a machine may play as many while a kill waits for its moment; a run that is faster ends with fewer kills"""
TIMEOUT_S = 600.0
"""between a kill and the checkpoint after it"""
START_S = 120.0
GRACE_S = 10.0
POLL_S = 0.05
VICTIMS = {
    "controller": ("agentrl.cli",),
    "rank": ("rank_process",),
    "runner": ("multiprocessing.spawn", "ray::RunnerActor.serve"),
    "engine": ("sglang.launch_server",),
    "raylet": ("raylet/raylet",),
}
"""what the command line of a victim holds"""


@dataclass(frozen=True)
class Flavour:
    """A kind of run."""

    victims: tuple[str, ...]
    flags: str = ""
    servers: bool = False
    """it starts two servers"""
    ray: bool = False
    """it runs on raylets; without servers of its own, one is outside"""
    equals: str | None = None
    """the undisturbed run that it must equal; None: it is accounted and replayed"""


_REMOTE = "--engine sglang --weight-sync disk --runner-processes 2"
FLAVOURS = {
    "local": Flavour(("controller", "rank"), equals="local"),
    "servers": Flavour(("controller", "rank", "runner"), _REMOTE, servers=True, equals="servers"),
    "engines": Flavour(("controller", "rank", "runner", "engine"), _REMOTE, servers=True),
    "async": Flavour(("controller", "rank"), "--schedule async --use-tis"),
    "ray": Flavour(("controller", "rank", "runner", "raylet"), _REMOTE, ray=True, equals="servers"),
    "all": Flavour(tuple(VICTIMS), _REMOTE, servers=True, ray=True),
}


class Cluster:
    """Three raylets of two CPUs each."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address

    def raylets(self) -> dict[int, Any]:
        """The living nodes by the process of their raylet."""
        return {node.all_processes["raylet"][0].process.pid: node for node in self._cluster.worker_nodes}

    def replace(self, pid: int) -> None:
        """Start another node in place of one whose raylet was killed."""
        self._cluster.remove_node(self.raylets()[pid], allow_graceful=False)
        self._cluster.add_node(num_cpus=2)


class Chaos:
    """The processes of a run.

    Args:
        supervisor: the process of the command.
        run: its run folder.
        mark: what its processes have in their environment.
        cluster: the ray cluster on which it runs; None: none.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], run: Path, mark: str, cluster: Cluster | None) -> None:
        self.supervisor, self.run, self._mark, self._cluster = supervisor, run, mark, cluster

    def pids(self, kind: str) -> list[int]:
        """The living processes of a kind."""
        if kind == "raylet":
            return [] if self._cluster is None else list(self._cluster.raylets())
        found = [pid for pid in marked(self._mark) if any(word in command_line(pid) for word in VICTIMS[kind])]
        if kind == "controller":
            return [pid for pid in found if parent_of(pid) == self.supervisor.pid]
        return found

    def kill(self, kind: str, chance: random.Random, *, after_rollouts: int, delay_s: float) -> int:
        """Kill a process of a kind once so many rollouts are in a checkpoint, and a time later; returns its id, or 0 if the run has ended before."""
        deadline, due = time.monotonic() + TIMEOUT_S, None
        while self.supervisor.poll() is None:
            if due is None and self.rollouts() >= after_rollouts:
                due = time.monotonic() + delay_s
            pids = self.pids(kind) if due is not None and time.monotonic() >= due else []
            if pids:
                pid = chance.choice(sorted(pids))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    if kind == "raylet" and self._cluster is not None:
                        self._cluster.replace(pid)
                    return pid
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {kind} after {after_rollouts} rollouts within {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return 0

    def rollouts(self) -> int:
        """Rollouts in the last checkpoint."""
        found = checkpoints(self.run)
        return int(found[-1].name) if found else 0

    def orphans(self) -> list[int]:
        """Ranks, runner processes and engines that are there although the run has ended."""
        deadline = time.monotonic() + GRACE_S
        while (left := [p for kind in ("rank", "runner", "engine") for p in self.pids(kind)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(POLL_S)
        return left


def marked(mark: str) -> list[int]:
    """The processes, except zombies, that inherited a mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@contextmanager
def started(words: Sequence[str], output: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """`agentrl train`, whose output goes into a file. None of its processes on this machine outlives the block."""
    command = [sys.executable, "-m", "agentrl.cli", "train", *words]
    with output.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, MARK: mark}
        )
    try:
        yield process
    finally:
        signal_session(process.pid, signal.SIGKILL)
        process.wait()


def interpreter(folder: Path) -> Path:
    """What `--engine-python` gets: an interpreter that seems to have SGLang."""
    program = folder / "python"
    words = shlex.join([sys.executable, str(HERE / "local_server.py")])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o700)
    return program


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server that no run starts or ends; its address."""
    from agentrl.run.model_folder import model_folder

    port = free_port()
    words = ["-m", "sglang.launch_server", "--model-path", str(model_folder("search_r1_3m")), "--port", str(port)]
    with (folder / "server.out").open("wb") as out:
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        process = subprocess.Popen([str(interpreter(folder)), *words], stdout=out, stderr=out, env=environment)
    try:
        wait_for(port, process, folder / "server.out")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until a server answers."""
    import httpx

    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
            return
        time.sleep(POLL_S)
    raise SystemExit(output.read_text())


@contextmanager
def cluster_of(mark: str) -> Iterator[Cluster]:
    """A ray cluster whose processes have a mark: they get the environment of this process."""
    from ray_clusters import started as started_cluster

    os.environ[MARK] = mark
    try:
        with started_cluster([2, 2, 2]) as cluster:
            yield Cluster(cluster)
    finally:
        del os.environ[MARK]


def flags_of(flavour: Flavour, folder: Path, stack: ExitStack, cluster: Cluster | None) -> list[str]:
    """The flags of a run; what it uses is started, and ends with the stack."""
    words = [*WORDS.split(), *flavour.flags.split(), "--actor-num-gpus-per-node", "1"]
    if flavour.servers:
        words += ["--engine-python", str(interpreter(folder)), "--rollout-num-gpus", "2"]
    elif cluster is not None:
        words += ["--rollout-external-engine-addrs", stack.enter_context(server(folder))]
    if cluster is not None:
        (folder / "weights").mkdir()
        words += ["--ray-address", cluster.address, "--update-weight-disk-dir", str(folder / "weights")]
    return words


def disturb(name: str, chaos: Chaos, victims: Sequence[str], kills: int, chance: random.Random) -> Counter[str]:
    """Kill processes, each a random time after a checkpoint that followed the kill before; returns the kills by kind."""
    done: Counter[str] = Counter()
    kinds = ([*victims] * kills)[:kills]
    chance.shuffle(kinds)
    for kind in kinds:
        delay_s = chance.uniform(0.0, LATEST_S)
        pid = chaos.kill(kind, chance, after_rollouts=chaos.rollouts() + 1, delay_s=delay_s)
        if not pid:
            break
        done[kind] += 1
        print(f"{name}: kill {done.total()} of {kills}: {kind} {pid} after {chaos.rollouts()} rollouts", flush=True)
    return done


def unaccounted(run: Path, rollouts: int) -> list[str]:
    """What is missing, there twice or wrong in a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    found = []
    if [(row["step"], row["policy_version"]) for row in rows] != [(n, n + 1) for n in range(rollouts)]:
        found.append(f"rollouts and versions: {[(row['step'], row['policy_version']) for row in rows]}")
    if violations := [row["step"] for row in rows if row["exactness_violations"]]:
        found.append(f"violations of exactness in {violations}")
    episodes = [r for r in read_records(run / "episodes") if r["split"] == "train" and r["status"] != "failed"]
    by_rollout, by_index = Counter(r["step"] for r in episodes), Counter(r["index"] for r in episodes)
    if by_rollout != dict.fromkeys(range(rollouts), GROUPS * SAMPLES):
        found.append(f"episodes by rollout: {dict(by_rollout)}")
    if twice := [index for index, count in by_index.items() if count > 1]:
        found.append(f"episodes that count twice: {twice}")
    return found


def replayed(run: Path, folder: Path) -> list[str]:
    """How the weights differ from those of training on the record alone."""
    again, output = folder / "replayed", folder / "replayed.out"
    with started(["--train-only", str(run), "--run", str(again)], output, "replay") as process:
        if process.wait():
            return [f"--train-only failed: {output.read_text()[-1000:]}"]
    same = fingerprint(again)["weights"] == fingerprint(run)["weights"]
    return [] if same else ["the weights of --train-only differ"]


def whole_run(name: str, rollouts: int) -> dict[str, Any]:
    """What a run of a flavour gives that nobody disturbs."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        words = flags_of(FLAVOURS[name], folder, stack, None)
        words += ["--run", str(folder / "run"), "--num-rollout", str(rollouts)]
        with started(words, folder / "out", "whole") as process:
            if process.wait():
                raise SystemExit((folder / "out").read_text())
        return fingerprint(folder / "run")


def play(seed: int, name: str, kills: int, expected: Mapping[str, Any] | None) -> dict[str, Any]:
    """A run with kills; returns its facts. `expected`: what it must equal."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends too
    flavour, rollouts, chance = FLAVOURS[name], ROLLOUTS_PER_KILL * kills, random.Random(seed)
    mark, begin = f"{os.getpid()}-{seed}", time.perf_counter()
    done, faults = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        run, output = folder / "run", folder / "out"
        cluster = stack.enter_context(cluster_of(mark)) if flavour.ray else None
        words = flags_of(flavour, folder, stack, cluster)
        words += ["--run", str(run), "--num-rollout", str(rollouts), "--use-fault-tolerance"]
        with started(words, output, mark) as process:
            chaos = Chaos(process, run, mark, cluster)
            try:
                done = disturb(f"run {seed}, {name}", chaos, flavour.victims, kills, chance)
                status = process.wait(TIMEOUT_S)
                faults += [f"status {status}: {output.read_text()[-1500:]}"] if status else []
                faults += [f"processes {left} are left"] if (left := chaos.orphans()) else []
            except (TimeoutError, subprocess.TimeoutExpired) as e:
                faults.append(f"{e}: {output.read_text()[-1500:]}")
        if not faults:
            faults += unaccounted(run, rollouts)
            mine = fingerprint(run)
            faults += replayed(run, folder) if expected is None else differences(mine, dict(expected))
    seconds = round(time.perf_counter() - begin, 1)
    facts = {"seed": seed, "flavour": name, "kills": dict(done), "rollouts": rollouts}
    return {**facts, "episodes": rollouts * GROUPS * SAMPLES, "seconds": seconds, "faults": faults}


def play_runs(
    runs: Sequence[Mapping[str, Any]],
    flavours: Sequence[str],
    wholes: Mapping[str, Mapping[str, Any]],
    args: argparse.Namespace,
    *,
    until: float,
) -> Iterator[dict[str, Any]]:
    """Play runs of the flavours in turn, `--jobs` at a time, until a record with these runs has enough kills; none starts after the time `until`."""
    kills = sum(sum(run["kills"].values()) for run in runs)
    seed = max([run["seed"] for run in runs], default=-1) + 1
    playing: set[Future[dict[str, Any]]] = set()
    spawned = {
        "mp_context": multiprocessing.get_context("spawn"),
        "max_tasks_per_child": 1,
    }  # ray wants a main thread for each
    with ProcessPoolExecutor(args.jobs, **spawned) as pool:
        while True:
            while (
                len(playing) < args.jobs and kills + args.kills * len(playing) < args.count and time.monotonic() < until
            ):
                name = flavours[seed % len(flavours)]
                playing.add(pool.submit(play, seed, name, args.kills, wholes.get(str(FLAVOURS[name].equals))))
                seed += 1
            if not playing:
                return
            done, playing = wait(playing, return_when=FIRST_COMPLETED)
            for future in done:
                kills += sum(future.result()["kills"].values())
                yield future.result()


def record_of(runs: Sequence[Mapping[str, Any]], args: argparse.Namespace, left_out: Sequence[str]) -> dict[str, Any]:
    """The record of all runs."""
    good = [run for run in runs if not run["faults"]]
    totals = [sum((Counter(run["kills"]) for run in part), Counter[str]()) for part in (good, runs)]
    command = f"python benchmarks/chaos.py --count {args.count} --kills {args.kills} --jobs {args.jobs}"
    flavours = Counter(run["flavour"] for run in good)
    return result_record(
        "kills_survived",
        totals[0].total(),
        totals[1].total(),
        command,
        cores=os.cpu_count(),
        kills=dict(totals[0]),
        flavours=dict(flavours),
        episodes=sum(run["episodes"] for run in good),
        left_out=list(left_out),
        faults=[fault for run in runs for fault in run["faults"]],
        runs=list(runs),
    )


def main() -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills of the whole record")
    parser.add_argument("--kills", type=int, default=8, help="kills of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each of about three cores")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after this time")
    parser.add_argument("--flavours", nargs="+", choices=FLAVOURS, default=list(FLAVOURS), help="of the runs, in turn")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the record, which keeps the runs that it has")
    args = parser.parse_args()
    begin = time.monotonic()
    left_out = [] if find_spec("ray") else ["ray: it is not installed"]
    flavours = [name for name in args.flavours if not (FLAVOURS[name].ray and left_out)]
    runs: list[dict[str, Any]] = json.loads(args.out.read_text()).get("runs", []) if args.out.exists() else []
    if sum(sum(run["kills"].values()) for run in runs) < args.count:
        names = {FLAVOURS[name].equals for name in flavours} - {None}
        wholes = {str(name): whole_run(str(name), ROLLOUTS_PER_KILL * args.kills) for name in sorted(map(str, names))}
        for run in play_runs(runs, flavours, wholes, args, until=begin + 60 * args.minutes):
            runs = sorted([*runs, run], key=lambda run: run["seed"])
            print(json.dumps(run), flush=True)
            args.out.write_text(json.dumps(record_of(runs, args, left_out), indent=2) + "\n")
    record = record_of(runs, args, left_out)
    print(
        f"{record['value']} of {record['baseline']} kills survived: {record['kills']}, in runs of {record['flavours']}"
    )
    return int(bool(record["faults"]) or not runs)


if __name__ == "__main__":
    sys.exit(main())
