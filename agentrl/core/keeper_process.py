"""Runs a command and ends everything in its session when the parent of this process ends. Passed to `python -ISc` as text; standard library only.

Arguments: the parent's process id, and the command. The kernel signals the end of the parent (more exactly, of the thread that started this process).
The exit status is the command's; if a signal killed it, this process ends by the same one. SIGTERM and SIGINT are left to the command.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

PDEATHSIG = 1
FORGOTTEN_S = 1.0
"""what a tracker of resources has to remove them, once nobody uses it"""


def _members() -> "list[int]":
    """The other processes of this session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                session = file.read().rpartition(")")[2].split()[3]
        except OSError:
            continue  # it has ended
        if int(session) == os.getpid() != int(name):
            found.append(int(name))
    return found


def _is_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes what its users left when the last of them has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def _kill(pids: "list[int]") -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end_session(*_signal: object) -> None:
    for _attempt in range(3):  # a process that is being killed may have started another
        _kill([pid for pid in _members() if not _is_tracker(pid)])
        time.sleep(0.02)
    deadline = time.monotonic() + FORGOTTEN_S
    while _members() and time.monotonic() < deadline:
        time.sleep(0.02)
    _kill(_members())
    os._exit(0)


def main() -> None:
    """Run the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ended = {signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    signal.signal(signal.SIGHUP, _end_session)
    prctl = ctypes.CDLL(None).prctl
    prctl(PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
    child = os.fork()
    if child == 0:
        prctl(PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ended)
        try:
            os.execvp(command[0], command)
        except OSError as e:
            print(f"{command[0]}: {e.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ended)
    if os.getppid() != parent:
        _end_session()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
