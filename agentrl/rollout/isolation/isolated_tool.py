"""Tools in processes of their own: objects of `Tool`, one process each, and functions, which share a few."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from agentrl.rollout.isolation.fork_server import ForkServer, UserProcess, modules_of
from agentrl.tool import Tool

CLOSE_TIMEOUT_S = 10.0
"""Time limit of a tool's `close`, before its process is killed."""
MAX_CALLS = 1000
"""Calls of functions after which a process is replaced, so that what they leak is freed."""
MAX_IDLE = 8
"""Processes of one function that are kept for further calls."""


class ToolHost:
    """Holds a `Tool` or a function in its process."""

    def __init__(self, target: Tool | Callable[..., Any]) -> None:
        self._target = target

    def prepare(self, operation: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """See `Host`."""
        target: Any = self._target
        return partial(getattr(target, operation) if operation else target, *args, **kwargs)


class IsolatedTool(Tool):
    """Stands for a `Tool` object that runs in a separate process."""

    def __init__(self, tool: Tool, name: str, server: ForkServer) -> None:
        self._tool, self._what, self._server = tool, f"tool {name}", server
        self._seed: int | None = None
        self._process: UserProcess | None = None
        self._opening = asyncio.Lock()

    async def setup(self, seed: int) -> None:
        """See `Tool.setup`."""
        self._seed = seed
        await self._running_process()

    async def run(self, **arguments: Any) -> Any:
        """Call the tool. A process that ends during a call, or is killed since its time expired, is replaced by the next call."""
        process = await self._running_process()
        try:
            return await process.call("call", **arguments)
        except asyncio.CancelledError:
            await process.close()
            raise

    async def close(self) -> None:
        """See `Tool.close`; then the process is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.how_it_ended is None:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await process.call("close")
        finally:
            await process.close()

    async def _running_process(self) -> UserProcess:
        async with self._opening:
            if self._process is None or self._process.how_it_ended is not None:
                host = partial(ToolHost, self._tool)
                self._process = await self._server.open(host, self._what, modules_of(type(self._tool)))
                await self._process.call("setup", self._seed)
            return self._process


class IsolatedFunction:
    """A tool function whose calls run in processes that are kept for further calls."""

    def __init__(self, function: Callable[..., Any], name: str, server: ForkServer) -> None:
        self._host, self._what, self._server = partial(ToolHost, function), f"tool {name}", server
        self._modules = modules_of(function)
        self._idle: list[tuple[UserProcess, int]] = []
        """each with the number of its calls"""

    async def __call__(self, **arguments: Any) -> Any:
        process, calls = await self._take()
        try:
            return await process.call("", **arguments)
        finally:
            if process.interrupted or calls + 1 >= MAX_CALLS or len(self._idle) >= MAX_IDLE:
                await process.close()
            else:
                self._idle.append((process, calls + 1))

    async def _take(self) -> tuple[UserProcess, int]:
        while self._idle:
            process, calls = self._idle.pop()
            if process.how_it_ended is None:
                return process, calls
        return await self._server.open(self._host, self._what, self._modules), 0
