"""`agentrl` in forks of one process that has imported torch and megatron, each killed at a given moment: importing takes longest.

It serves jobs (forked_jobs.py), after the id of the process whose forks are the ranks: {"words": arguments, "ranks": N, "kill": moment or null,
"record": [folder, file] or null, "output": file}. A line of the output that begins with SEEN has the events and the calls. With "record", what
happens to the folder is recorded (see power_loss.py) and pickled into the file. KILLS_MEMORY names the folder that the runs use as shared memory.

A moment is {"after_s": S} after the start; {"event": N}, before the N-th time that a file, folder, process or socket is touched; or
{"inside": METHOD, "call": N, "after_s": S}, after the N-th call of a method of the trainer or the weight sync. With "rank", a rank is killed.
"""

import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from forked_jobs import serve
from power_loss import Recorder

from agentrl.core.child_process import POLL_S, exit_now, how_it_ended, process_exists

EVENTS = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.listdir", "os.scandir",
    "shutil.rmtree", "shutil.copyfile", "fcntl.flock", "socket.bind", "socket.connect", "subprocess.Popen", "mmap.__new__",
}  # fmt: skip


class ForkedRank:
    """A `RankProcess`. The rank is a child of the template of ranks, which reaps it."""

    def __init__(self, pid, connection):
        self.pid, self.connection = pid, connection

    def ended(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while process_exists(self.pid):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)
        return how_it_ended(-int(signal.SIGKILL))

    def kill(self):
        for kill in (os.kill, os.killpg):  # it may not lead its group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        if self.ended(60) is None:
            raise TimeoutError(f"rank {self.pid} does not end")


class RankTemplate:
    """A process that has imported what ranks import, and forks them. It changes torch for itself, so runs are not forked from it."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self.socket.close()
            self.serve(theirs)
        theirs.close()

    def fork_ranks(self, count, log):
        """Ranks that wait for their first command; called once by each run."""
        ranks = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.socket, [json.dumps([os.getpid(), log]).encode()], [theirs.fileno()])
            ranks.append(ForkedRank(int(self.socket.recv(32)), Connection(ours.detach())))
        return ranks

    def serve(self, requests):
        from agentrl.train.megatron import cpu_shim

        cpu_shim.install()
        from agentrl.train.megatron import rank, rank_process  # noqa: F401

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
        rank_process.exit_with_parent = exit_without
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 4096, 1)
            if not message:
                os._exit(0)
            parent, log = json.loads(message)
            pid = os.fork()
            if not pid:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                os.setsid()
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                rank_process.main(["", str(descriptors[0]), str(parent)])
            os.close(descriptors[0])
            requests.send(str(pid).encode())


def exit_without(parent):
    """As `exit_with_parent`, for a rank that is not a child of its run."""

    def watch():
        while process_exists(parent):
            time.sleep(POLL_S)
        exit_now()

    threading.Thread(target=watch, daemon=True).start()


def use_ranks(ranks):
    """Have the run's RankPool take these ranks instead of starting some."""
    from agentrl.train.megatron.rank_place import ThisMachine

    waiting = list(ranks)

    def start(self, rank, log, threads):
        log.touch()
        return waiting.pop(0)

    ThisMachine.start = start


class Killer:
    """Kills this process, or its first rank, at a moment; counts the events and the calls that moments name."""

    def __init__(self, moment, ranks):
        self.moment, self.ranks, self.events, self.calls = moment or {}, ranks, 0, Counter()
        sys.addaudithook(self.count)
        self.wrap_methods()
        if "after_s" in self.moment and "inside" not in self.moment:
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

    def wrap_methods(self):
        from agentrl.run.training import TrainingRun
        from agentrl.store.run_folder import RunFolder
        from agentrl.train.megatron.trainer import MegatronTrainer
        from agentrl.weight_sync.colocated import ColocatedSync
        from agentrl.weight_sync.disk import DiskSync, LocalDiskSync

        for owner, names in (
            (MegatronTrainer, ("step", "begin_save", "save", "export_weights", "load", "close")),
            (LocalDiskSync, ("update",)),
            (DiskSync, ("update",)),
            (ColocatedSync, ("update",)),
            (RunFolder, ("export",)),
            (TrainingRun, ("complete_save",)),
        ):
            for name in names:
                setattr(owner, name, self.wrapped(getattr(owner, name), name))

    def wrapped(self, method, name):
        def call(*args, **more):
            self.calls[name] += 1
            if name == self.moment.get("inside") and self.calls[name] == self.moment["call"]:
                self.kill_after(self.moment["after_s"])
            return method(*args, **more)

        return call


@contextmanager
def recorded(folder, file):
    """A block in which what happens to a folder is recorded into a file."""
    record = Recorder(Path(folder))
    with record.recording():
        yield
    Path(file).write_bytes(pickle.dumps(record.log))


def run(job, template):
    """Run the command in this process; returns its status."""
    from agentrl.cli.main import main

    ranks = template.fork_ranks(job["ranks"], job["output"])
    use_ranks(ranks)
    killer = Killer(job["kill"], ranks)
    try:
        with recorded(*job["record"]) if job["record"] else nullcontext():
            return main(job["words"])
    finally:
        print(f"\nSEEN {json.dumps({'events': killer.events, 'calls': killer.calls})}", flush=True)


def prepare():
    """Import what a run imports, load its corpus, and start no thread; returns the template of its ranks."""
    import torch
    import tqdm
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # it is a thread
    import agentrl.cli.main
    import agentrl.engine.local.engine
    import agentrl.run.training
    import agentrl.train.megatron.trainer
    import agentrl.weight_sync.base
    import agentrl.weight_sync.disk
    from agentrl.envs.search_r1 import SearchR1

    SearchR1().search("capital")
    assert threading.active_count() == 1
    agentrl.weight_sync.base.MEMORY = Path(os.environ["KILLS_MEMORY"])
    return RankTemplate()


if __name__ == "__main__":
    ranks_template = prepare()
    serve(lambda job: run(job, ranks_template), greeting=ranks_template.pid)
