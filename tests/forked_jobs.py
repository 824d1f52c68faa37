"""A process that imports once and forks a child for each job, which saves most of the time of short runs; and the caller's side of it.

A job is a dict with "output": the file of what the child prints. The caller gets its exit status (−9: killed) and how long it took.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback

from processes import read_line

LIMIT_S = 1200.0
"""of a job; one that takes longer is killed, with status 124"""


def serve(play, greeting=None):
    """Say the greeting; then call `play` with each job of the input in a child of this process, which ends with the returned status."""
    print(json.dumps(greeting), flush=True)
    for line in sys.stdin:
        job, started = json.loads(line), time.monotonic()
        child = os.fork()
        if not child:
            play_and_end(play, job)
        print(json.dumps({"status": wait_for(child), "seconds": time.monotonic() - started}), flush=True)


def play_and_end(play, job):
    """Play the job in this process, in a session of its own, and end."""
    os.setsid()
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)  # ranks append too
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    status = 70
    try:
        status = play(job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait_for(pid):
    """The exit status of a child."""
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


class ForkedJobs:
    """The caller's side of a program that serves."""

    def __init__(self, program, env=None):
        words = [sys.executable, str(program)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.greeting = json.loads(read_line(self.process, LIMIT_S))

    def run(self, job):
        """The status and seconds of a job, and the text of its output."""
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = json.loads(read_line(self.process, 2 * LIMIT_S))
        with open(job["output"], errors="replace") as file:
            return answer | {"output": file.read()}

    def close(self):
        """End the program."""
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
