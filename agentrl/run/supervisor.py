"""Runs `agentrl train` as a child process and starts it again after a crash (`--use-fault-tolerance`).

The child reports its run folder, and errors that would come again, over a pipe. It is not started again after such an error (invalid input, a
damaged record, a loss that is not finite), after a signal of the user, and after `MAX_RESTARTS` crashes without a new checkpoint in between.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.core.child_process import exit_with_parent, how_it_ended
from agentrl.core.program_name import command
from agentrl.errors import NonFiniteError, StoreError, UsageError
from agentrl.store.checkpoints import checkpoints

MAX_RESTARTS = 3
"""crashes without a new checkpoint in between after which the run is started again"""
BACKOFF_S = 1.0
"""pause before the first restart; it grows fourfold with each further one without a new checkpoint"""
INTERRUPTED = 130
"""exit status after a signal of the user"""
_FD = "AGENTRL_SUPERVISOR_FD"
_FINAL, _FOLDER = b"final", b"folder "
_USER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


# -- the child -----------------------------------------------------------------------------------------------------------


class Supervised:
    """The child's end of the pipe."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        exit_with_parent(os.getppid())

    @classmethod
    def of_environment(cls) -> Supervised | None:
        """The pipe to the supervisor that started this process; None: there is no supervisor."""
        fd = os.environ.pop(_FD, None)
        return None if fd is None else cls(int(fd))

    def report_folder(self, path: Path) -> None:
        """The run has this folder now, so it can be resumed."""
        os.write(self._fd, _FOLDER + os.fsencode(path.absolute()) + b"\n")

    @contextmanager
    def reporting_final_errors(self) -> Iterator[None]:
        """Report an error that would come again."""
        try:
            yield
        except (UsageError, StoreError, NonFiniteError):
            os.write(self._fd, _FINAL + b"\n")
            raise


# -- the parent ----------------------------------------------------------------------------------------------------------


class _Child:
    """One process of the run, and what it reported."""

    def __init__(self, words: Sequence[str]) -> None:
        self._reports, theirs = os.pipe()
        os.set_blocking(self._reports, False)
        # in a separate process group, so that Ctrl-C reaches it once, through the supervisor
        self.process = subprocess.Popen(words, pass_fds=[theirs], env={**os.environ, _FD: str(theirs)}, process_group=0)
        os.close(theirs)

    def wait(self) -> tuple[int, list[bytes]]:
        """Its exit code and its reports, once it has ended."""
        code = self.process.wait()
        try:
            reports = os.read(self._reports, 1 << 16)
        except BlockingIOError:  # a process that it started holds the other end
            reports = b""
        os.close(self._reports)
        return code, reports.splitlines()


def supervise(
    first: Sequence[str],
    resume: Callable[[Path], Sequence[str]],
    echo: Callable[[str], None],
    *,
    backoff_s: float = BACKOFF_S,
) -> int:
    """Run a command until it ends without a crash; returns its exit status.

    Args:
        first: the command.
        resume: the command that continues the run in a folder.
        echo: shows a message to the user.
        backoff_s: pause before the first restart.
    """
    words, folder, crashes, progress = first, None, 0, ""
    with _forwarded_signals() as forwarding:
        while True:
            child = _Child(words)
            forwarding.to(child.process)
            code, reports = child.wait()
            folder = _reported_folder(reports) or folder
            if code == 0 or _FINAL in reports or code == INTERRUPTED or -code in _USER_SIGNALS or forwarding.signalled:
                return code if code >= 0 else 128 - code
            before, progress = progress, _progress(folder)
            crashes = 1 if progress != before else crashes + 1
            if crashes > MAX_RESTARTS:
                echo(f"the run {how_it_ended(code)}; {_given_up(folder)}")
                return code if code > 0 else 128 - code
            delay_s = backoff_s * 4 ** (crashes - 1)
            where = f"from the last checkpoint of {folder}" if folder else "from the beginning"
            echo(
                f"the run {how_it_ended(code)}; it is started again {where} in {delay_s:g} s (restart {crashes} of {MAX_RESTARTS})"
            )
            if forwarding.wait(delay_s):
                return INTERRUPTED
            words = resume(folder) if folder else first


def _given_up(folder: Path | None) -> str:
    again = f"; to continue: {command('train', '--resume', folder)}" if folder else ""
    return f"it was started again {MAX_RESTARTS} times without a new checkpoint and is given up{again}"


def _reported_folder(reports: Sequence[bytes]) -> Path | None:
    folders = [Path(os.fsdecode(line.removeprefix(_FOLDER))) for line in reports if line.startswith(_FOLDER)]
    return folders[-1] if folders else None


def _progress(folder: Path | None) -> str:
    """The name of the last checkpoint."""
    found = checkpoints(folder) if folder else []
    return found[-1].name if found else ""


class _Forwarding:
    """Passes signals of the user on to the child."""

    def __init__(self) -> None:
        self.signalled = False
        self._process: subprocess.Popen[bytes] | None = None
        self.reader, self.writer = os.pipe()

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """Signals go to this process from now on; one that has arrived already too."""
        self._process = process
        if self.signalled:
            process.send_signal(signal.SIGTERM)

    def handle(self, number: int, frame: object) -> None:
        self.signalled = True
        os.write(self.writer, b"x")
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait; whether a signal arrived."""
        self._process = None
        return self.signalled or bool(select.select([self.reader], [], [], seconds)[0])


@contextmanager
def _forwarded_signals() -> Iterator[_Forwarding]:
    """A block in which signals of the user go to the child. One that is ignored stays ignored."""
    forwarding = _Forwarding()
    numbers = [n for n in _USER_SIGNALS[:3] if signal.getsignal(n) is not signal.SIG_IGN]
    before: Mapping[int, object] = {n: signal.signal(n, forwarding.handle) for n in numbers}
    try:
        yield forwarding
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(forwarding.reader)
        os.close(forwarding.writer)
