"""The process from which user processes are forked. It imports the user's modules once, runs nothing else of theirs, and has one thread.

Each user process is a subreaper: its descendants stay below it while it lives. When it ends, they become children of this process, which kills
them. So every child that is not a user process is what a user process left behind.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from agentrl.core.child_process import POLL_S, become_subreaper, children_of, die_with_parent, kill_children
from agentrl.core.registry import USER_MODULE, import_module, load_file
from agentrl.errors import describe
from agentrl.rollout.isolation.user_process import serve_user_code
from agentrl.tool import spec_of

FORK, KILL = b"F", b"K"
"""commands; each is followed by the token of a user process, 8 bytes"""
TOKEN_BYTES = 8
READY = 0
"""token of the event that the imports are done"""
Modules = Sequence[tuple[str, str | None]]
"""names of modules, each with its file if it was loaded by path"""


def load_modules(modules: Modules) -> None:
    """Import modules under the names that they have in the controller."""
    for name, file in modules:
        if file is None:
            import_module(name)
        else:
            load_file(Path(file))


def serve_forks(commands: socket.socket, events: socket.socket, controller: int, modules: Modules) -> None:
    """Run the process, a child of the process `controller`, until that closes `commands` or is gone."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    signal.signal(signal.SIGCHLD, lambda *_: None)
    become_subreaper()
    with suppress(Exception):  # user code; the same import fails in the user process, which reports it
        load_modules([m for m in modules if m[0].startswith(USER_MODULE) or m[1] is None])
    spec_of(children_of)  # the first schema takes 0.2 s, as pydantic looks for plugins
    gc.freeze()  # forked processes share these objects; a collection would copy their pages
    commands.setblocking(False)
    _ForkServerProcess(commands, events, controller).run()


class _ForkServerProcess:
    def __init__(self, commands: socket.socket, events: socket.socket, controller: int) -> None:
        self._commands, self._events, self._controller = commands, events, controller
        self._tokens: dict[int, int] = {}
        """token of each user process, by process id"""
        self._wakeup, self._woken = socket.socketpair()
        self._wakeup.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        """Fork, kill and reap until the controller is gone."""
        self._report(READY, None, "")
        poll = select.poll()
        poll.register(self._commands, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while os.getppid() == self._controller:
            poll.poll(POLL_S * 1000)
            with suppress(BlockingIOError):
                self._wakeup.recv(4096)
            try:
                if not self._obey():
                    break
            except BlockingIOError:
                pass
            self._reap()
        while children_of(os.getpid()):
            kill_children(os.getpid())
            self._reap(report=False)
        os._exit(0)

    def _obey(self) -> bool:
        """Read one command; False at end of file."""
        command, descriptors, _, _ = socket.recv_fds(self._commands, 1 + TOKEN_BYTES, 1)
        if not command:
            return False
        token = int.from_bytes(command[1:], "big")
        if command[:1] == FORK:
            with socket.socket(fileno=descriptors[0]) as theirs:
                try:
                    pid = os.fork()
                except OSError as e:
                    self._report(token, None, describe(e))
                    return True
                if pid == 0:
                    self._become_user_process(theirs)
                self._tokens[pid] = token
        else:
            for pid, known in self._tokens.items():
                if known == token:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        return True

    def _become_user_process(self, sock: socket.socket) -> NoReturn:
        """In the forked process: serve user code, and never return to the loop of this class."""
        try:
            signal.set_wakeup_fd(-1)
            for s in (self._commands, self._events, self._wakeup, self._woken):
                s.close()
            for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            die_with_parent()
            become_subreaper()
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("900")  # the kernel ends it before the controller
            serve_user_code(sock)
        finally:
            os._exit(1)

    def _reap(self, *, report: bool = True) -> None:
        """Report the user processes that have ended, and kill what they left behind."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._tokens:
                ended.append((self._tokens.pop(pid), os.waitstatus_to_exitcode(status)))
        kill_children(os.getpid(), keep=self._tokens)
        for token, code in ended if report else ():
            self._report(token, code, "")

    def _report(self, token: int, code: int | None, error: str) -> None:
        payload = pickle.dumps((token, code, error))
        with suppress(OSError):  # the controller is gone, as `run` will notice
            self._events.sendall(len(payload).to_bytes(4, "big") + payload)
