"""Environments and tools for tests of isolation, imported by their file: what they do ends, blocks or fills a process."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from agentrl import Env, StepResult, Tool, ToolEnv, tool
from agentrl.errors import InfraError


class IndexIsLoading(Exception):
    """An exception that only this file knows."""


class Hostile(Env):
    """Does in `step` what the policy writes."""

    isolation = "process"
    timeout_s = 20.0

    def __init__(self, notes=""):
        self.notes = Path(notes)

    def reset(self, task, *, seed, group_seed):
        self.seed, self.group_seed = seed, group_seed
        return task.prompt

    def step(self, action):
        return getattr(self, f"_{action.text}")()

    def state(self):
        return {"pid": os.getpid(), "seed": self.seed, "group_seed": self.group_seed}

    def close(self):
        self.notes.write_text(f"closed in {os.getpid()}")

    @tool(timeout_s=0.3)
    def search(self, query: str) -> str:
        """Look something up, or do something else."""
        return getattr(self, f"_{query}")()

    def _end(self):
        return StepResult("ended", 1.0, True, info={"pid": os.getpid()})

    def _exit(self):
        os._exit(7)

    def _segfault(self):
        ctypes.string_at(0)

    def _hang(self):
        time.sleep(3600)

    def _block(self):
        """Hold the interpreter's lock in C, so that no other thread of this process runs."""
        ctypes.PyDLL(None).sleep(3600)

    def _raise(self):
        raise IndexIsLoading("not yet")

    def _infra(self):
        raise InfraError("the index is away")

    def _sys_exit(self):
        sys.exit(3)

    def _leave(self):
        """Start a process that leaves the session, and another that loses its parent."""
        script = (
            "import os, time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(3600)"
        )
        pids = [
            int(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE).stdout.readline())
            for _ in range(2)
        ]
        return StepResult("left", 0.0, True, info={"pids": pids})

    def _odd(self):
        return StepResult("odd", 0.0, True, info={"lock": threading.Lock(), "fine": (1, 2)})


class Polite(Hostile):
    """Lets its tools answer."""

    def step(self, action):
        return StepResult(action.results[0].content) if action.results else super().step(action)


class Swallows(Hostile):
    """Its async step cannot be cancelled."""

    timeout_s = 0.5

    async def step(self, action):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


class Reluctant(Hostile):
    timeout_s = 0.5


@tool(isolation="process", timeout_s=1.0, retries=0)
def function(does: str) -> str:
    """Do it in a process."""
    if does == "exit":
        os._exit(3)
    if does == "hang":
        time.sleep(3600)
    if does == "raise":
        raise IndexIsLoading("not yet")
    if does == "infra":
        raise InfraError("away")
    return f"{does} in {os.getpid()}"


class Notebook(Tool):
    """Counts its calls."""

    isolation = "process"

    def setup(self, seed):
        self.seed, self.calls = seed, 0

    def call(self, does: str) -> str:
        """Count."""
        self.calls += 1
        return function(does) if does in ("exit", "raise") else f"call {self.calls} in {os.getpid()}"


class Tools(ToolEnv):
    """Runs in the controller; its tools do not."""

    tools = (function, Notebook)

    def state(self):
        return {"pid": os.getpid()}


class Method(ToolEnv):
    @tool(isolation="process")
    def search(self, query: str) -> str:
        """Look something up."""
        return query
