"""The program inside a sandbox. It uses the standard library only, and is passed to `python -ISc` as text.

The agent (this process; process 1 where there are namespaces) reads requests, one JSON object a line, from standard input and answers on standard
output. Code runs in a forked worker, which keeps its variables from request to request. The agent caps the worker's output, ends it when a
limit is exceeded and forks another one, whose variables are new; files stay.
"""

import ast
import base64
import contextlib
import ctypes
import fcntl
import json
import linecache
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import time
import traceback
from typing import Any

INTERRUPT_GRACE_S = 1.0
"""time that interrupted code has before it is killed"""
POLL_S = 0.05
F_SETPIPE_SZ = 1031
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_STATE_BYTES = 1 << 20


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _send(descriptor: int, message: "dict[str, Any]") -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


class _Worker:
    """Runs code; it has the agent's limits and its own memory."""

    def __init__(self, requests: int, results: int, limits: "dict[str, Any]") -> None:
        self.requests, self.results, self.limits = os.fdopen(requests), results, limits
        self.names = {"__name__": "__main__", "__builtins__": __builtins__}
        self.cells = 0
        self.folder, self.environment = os.getcwd(), dict(os.environ)

    def run(self) -> None:
        for line in self.requests:
            request = json.loads(line)
            try:
                self.allow_cpu()
                ok = self.python(request["code"]) if request["op"] == "python" else self.shell(request["code"])
            except KeyboardInterrupt:
                print("KeyboardInterrupt", file=sys.stderr)
                ok = False
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            _send(self.results, {"ok": bool(ok)})

    def allow_cpu(self) -> None:
        spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(spent + self.limits["cpu_s"]) + 1, hard))

    def python(self, code: str) -> bool:
        self.cells += 1
        name = f"<code {self.cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                tree.body.pop()
            exec(compile(tree, name, "exec"), self.names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
                if value is not None:
                    print(repr(value))
            return True
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # noqa: BLE001  whatever the code raised, SystemExit too
            while e.__traceback__ is not None and not e.__traceback__.tb_frame.f_code.co_filename.startswith("<code"):
                e.__traceback__ = e.__traceback__.tb_next
            traceback.print_exception(e)
            return False

    def shell(self, command: str) -> bool:
        """Run a command in a shell that starts in the folder, and with the exported variables, with which the one before ended."""
        state = os.path.join(os.environ["TMPDIR"], ".shell")
        script = f"trap '{{ pwd > {state}.folder; env -0 > {state}.environment; }} 2> /dev/null' EXIT\n{command}"
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        folder = self.folder if os.path.isdir(self.folder) else os.environ["HOME"]
        process = subprocess.Popen(
            [shell, "-c", script], cwd=folder, env=self.environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            status = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        try:
            with open(f"{state}.folder") as file:
                self.folder = file.read(4096).rstrip("\n")
            with open(f"{state}.environment", "rb") as file:
                pairs = file.read(MAX_STATE_BYTES).decode(errors="surrogateescape").split("\0")
            if self.folder and len(pairs) > 1:  # else the sandbox's files are full
                self.environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        except OSError:
            pass  # the command removed them, or was killed
        if status:
            print(f"[exit status {status}]")
        return status == 0


class _Agent:
    """Answers requests, and supervises the worker."""

    def __init__(self, limits: "dict[str, Any]", requests: int, answers: int) -> None:
        self.limits, self.requests, self.answers = limits, requests, answers
        self.buffer = b""
        self.worker: tuple[int, int, int, int] | None = None

    def serve(self) -> None:
        while True:
            line = self.next_line()
            if line is None:
                self.kill_all()
                os._exit(0)
            request = json.loads(line)
            handler = {"write": self.write, "read": self.read}.get(request["op"], self.run)
            try:
                answer = handler(request)
            except OSError as e:
                answer = {"error": f"{type(e).__name__}: {e}"}
            _send(self.answers, answer)

    def next_line(self) -> "bytes | None":
        while b"\n" not in self.buffer:
            data = os.read(self.requests, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def start_worker(self) -> "tuple[int, int, int, int]":
        requests, results, output = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for descriptor in (requests[1], results[0], output[0], self.requests, self.answers):
                os.close(descriptor)
            os.dup2(output[1], 1)
            os.dup2(output[1], 2)
            sys.stdin = os.fdopen(0)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            limit = self.limits["memory_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            _Worker(requests[0], results[1], self.limits).run()
            os._exit(0)
        for descriptor in (requests[0], results[1], output[1]):
            os.close(descriptor)
        for descriptor in (results[0], output[0]):
            os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the system's limit of pipes
            fcntl.fcntl(output[0], F_SETPIPE_SZ, 1 << 20)
        self.worker = (pid, requests[1], results[0], output[0])
        return self.worker

    def run(self, request: "dict[str, Any]") -> "dict[str, Any]":
        worker = self.worker or self.start_worker()
        pid, requests, results, output = worker
        kept: list[bytes] = []
        total, limit = 0, request["max_output_bytes"]
        deadline, interrupted = time.monotonic() + request["time_s"], False
        reason: str | None = None
        poll = select.poll()
        for descriptor in (results, output, self.requests):
            poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):  # the worker has died; its end is noticed below
            _send(requests, request)
        answer: dict[str, Any] | None = None
        looked = 0.0
        while answer is None and reason is None:
            ready = dict(poll.poll(POLL_S * 1000))
            if ready.get(self.requests, 0) & select.POLLHUP:
                self.kill_all()
                os._exit(0)
            total += self.drain(output, kept, limit - sum(map(len, kept)), once=True)
            if results in ready:
                answer = self.result(results)
            late = time.monotonic() - deadline
            if late > 0 and not interrupted:
                interrupted = True
                os.kill(pid, signal.SIGINT)
            if late > INTERRUPT_GRACE_S:
                reason = "timeout"
            elif time.monotonic() - looked > POLL_S:
                looked = time.monotonic()
                reason = "memory" if self.memory() > self.limits["memory_bytes"] else None
        how = ""
        if answer is None or not answer:
            how = self.end_worker(worker, kill=reason is not None)
        total += self.drain(output, kept, limit - sum(map(len, kept)))
        if answer:
            status = "timeout" if interrupted else "ok" if answer["ok"] else "error"
        else:
            status = reason or "died"
            os.close(output)
        return {
            "status": status,
            "output": base64.b64encode(b"".join(kept)).decode(),
            "bytes": total,
            "how": how,
            "state_lost": self.worker is None,
        }

    def result(self, results: int) -> "dict[str, Any]":
        """The worker's answer; {} if it has died."""
        data = b""
        while not data.endswith(b"\n"):
            try:
                part = os.read(results, 4096)
            except BlockingIOError:
                continue
            if not part:
                return {}
            data += part
            if len(data) > 4096:
                return {}
        try:
            answer = json.loads(data.splitlines()[-1])
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) and isinstance(answer.get("ok"), bool) else {}

    def drain(self, output: int, kept: "list[bytes]", room: int, once: bool = False) -> int:
        """Read what has been written; keep the first `room` bytes. Returns the number of bytes read."""
        total = 0
        while True:
            try:
                data = os.read(output, 1 << 20)
            except BlockingIOError:
                return total
            if not data:
                return total
            total += len(data)
            if room > 0:
                kept.append(data[:room])
                room -= len(data)
            if once or total > 1 << 28:
                return total

    def memory(self) -> int:
        """Resident bytes of all processes of the sandbox, where they can be told from others."""
        if os.getpid() != 1:
            return 0
        pages = 0
        try:
            for entry in os.listdir("/proc"):
                if entry.isdigit() and entry != "1":
                    with open(f"/proc/{entry}/statm") as file:
                        fields = file.read().split()
                    pages += int(fields[1]) - int(fields[2])
        except (OSError, IndexError):
            pass  # no /proc, or a process has just ended
        return pages * resource.getpagesize()

    def end_worker(self, worker: "tuple[int, int, int, int]", kill: bool) -> str:
        pid, requests, results, _ = worker
        os.close(requests)
        os.close(results)
        self.worker = None
        if kill:
            self.kill_all()
            return ""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.kill_all()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def kill_all(self) -> None:
        """Kill every process of the sandbox but this one, and reap them."""
        for _ in range(1000):
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
            try:
                while os.waitpid(-1, 0)[0]:
                    pass
            except ChildProcessError:
                return

    def write(self, request: "dict[str, Any]") -> "dict[str, Any]":
        path = self.inside(request["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(request["data"]))
        return {}

    def read(self, request: "dict[str, Any]") -> "dict[str, Any]":
        descriptor = os.open(self.inside(request["path"]), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("not a regular file")
            data = file.read(request["max_bytes"] + 1)
        return {
            "data": base64.b64encode(data[: request["max_bytes"]]).decode(),
            "cut": len(data) > request["max_bytes"],
        }

    def inside(self, path: str) -> str:
        """The path below the work folder; links that lead out of it are refused."""
        work = os.path.realpath(os.environ["HOME"])
        path = os.path.realpath(os.path.join(work, path))
        if not path.startswith(work + os.sep):
            raise PermissionError(f"{path} lies outside of the work folder")
        return path


def _children() -> "list[int]":
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def main() -> None:
    """Argument: settings as JSON."""
    limits = json.loads(sys.argv[1])
    if os.getpid() != 1:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.path += limits["packages"]
    os.chdir(os.environ["HOME"])
    os.makedirs(os.environ["TMPDIR"], exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["disk_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    if limits["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"],) * 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    _send(answers, {"ready": True})
    _Agent(limits, requests, answers).serve()


if __name__ == "__main__":
    main()
