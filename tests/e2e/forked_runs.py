"""`agentrl` in forks of one process that has imported torch and megatron, each killed at a given moment: importing takes longest.

It reads a line of JSON for each job, {"words": arguments, "ranks": N, "kill": moment or null, "output": file}, and answers with a line of JSON:
the exit status (−9: killed), the seconds and the events. The ranks are forks too, children of the run as in a real one.

A moment is {"after_s": S} after the start; {"event": N}, before the N-th time that a file, folder, process or socket is touched; or
{"inside": METHOD, "call": N, "after_s": S}, after the N-th call of a method of the trainer or the weight sync. With "rank", a rank is killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

LIMIT_S = 300.0
EVENTS = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.listdir", "os.scandir",
    "shutil.rmtree", "shutil.copyfile", "fcntl.flock", "socket.bind", "socket.connect", "subprocess.Popen", "mmap.__new__",
}  # fmt: skip


class ForkedRank:
    """As much of a Popen as RankPool needs."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        deadline = time.monotonic() + (60 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.005)
        return self.returncode


def fork_ranks(count, log):
    """Rank processes that wait for their first command, with our ends of their sockets."""
    from agentrl.train.megatron import rank_process

    pairs = [socket.socketpair() for _ in range(count)]
    ranks = []
    for _, theirs in pairs:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            os.setsid()
            for other, end in pairs:
                other.close()
                if end is not theirs:
                    end.close()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            rank_process.main(["", str(theirs.fileno()), str(parent)])
        ranks.append(ForkedRank(pid))
    for _, theirs in pairs:
        theirs.close()
    return ranks, [Connection(ours.detach()) for ours, _ in pairs]


def use_ranks(ranks, connections):
    """Have the run's RankPool take these ranks instead of starting some."""
    from agentrl.train.megatron.rank_pool import RankPool

    waiting = list(zip(ranks, connections, strict=True))

    def start(self, log, env):
        log.touch()
        rank, connection = waiting.pop(0)
        self.processes.append(rank)
        self.connections.append(connection)

    RankPool._start = start


class Killer:
    """Kills this process, or its first rank, at a moment."""

    def __init__(self, moment, ranks):
        self.moment, self.ranks, self.events = moment or {}, ranks, 0
        sys.addaudithook(self.count)
        if "inside" in self.moment:
            self.wrap(self.moment["inside"])
        elif "after_s" in self.moment:
            self.kill_after(self.moment["after_s"])

    def kill(self):
        rank = self.moment.get("rank") and self.ranks and self.ranks[0].pid
        os.kill(rank or os.getpid(), signal.SIGKILL)

    def kill_after(self, seconds):
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()

    def count(self, event, _):
        if event in EVENTS:
            self.events += 1
            if self.events == self.moment.get("event"):
                self.kill()

    def wrap(self, name):
        from agentrl.run.training import TrainingRun
        from agentrl.store.run_folder import RunFolder
        from agentrl.train.megatron.trainer import MegatronTrainer
        from agentrl.weight_sync.disk import LocalDiskSync

        owner = next(c for c in (MegatronTrainer, LocalDiskSync, RunFolder, TrainingRun) if hasattr(c, name))
        method, calls = getattr(owner, name), [0]

        def wrapped(*args, **more):
            calls[0] += 1
            if calls[0] == self.moment["call"]:
                self.kill_after(self.moment["after_s"])
            return method(*args, **more)

        setattr(owner, name, wrapped)


def run(job):
    """Run the command in this process, which ends with its status."""
    os.setsid()
    descriptor = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, descriptor), (2, descriptor)):
        os.dup2(source, target)
    from agentrl.cli.main import main

    ranks, connections = fork_ranks(job["ranks"], job["output"])
    use_ranks(ranks, connections)
    killer = Killer(job["kill"], ranks)
    status = 70
    try:
        status = main(job["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        print(f"\nEVENTS {killer.events}", flush=True)
        os._exit(status)


def wait_for(pid):
    """The exit status of a child; one that hangs is killed, with status 124."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.005)


def prepare():
    """Import what a run and its ranks import, and nothing that starts a thread."""
    import torch

    from agentrl.train.megatron import cpu_shim

    torch.set_num_threads(1)
    cpu_shim.install()
    import agentrl.cli.main
    import agentrl.engine.local.engine
    import agentrl.run.training
    import agentrl.train.megatron.rank
    import agentrl.train.megatron.trainer
    import agentrl.weight_sync.disk  # noqa: F401


def serve():
    """Serve until the input ends."""
    prepare()
    for line in sys.stdin:
        job, started = json.loads(line), time.monotonic()
        child = os.fork()
        if not child:
            run(job)
        status, seconds = wait_for(child), time.monotonic() - started
        with open(job["output"], errors="replace") as file:
            events = [int(words[7:]) for words in file if words.startswith("EVENTS ")]
        print(json.dumps({"status": status, "seconds": seconds, "events": sum(events)}), flush=True)


if __name__ == "__main__":
    serve()
