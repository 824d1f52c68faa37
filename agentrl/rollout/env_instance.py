"""The environment of one episode: created, called and closed. All user code runs under its time limit and off the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.core.timeout_pool import TimeoutPool
from agentrl.env import Env, ToolEnv, constructor_is_trivial, task_tools
from agentrl.errors import EnvFailure, Failure, ToolFailure, UsageError, boundary
from agentrl.rollout.tool_executor import SaveOutput, ToolExecutor
from agentrl.tool import ToolSpec
from agentrl.types import Task

_MAX_HUNG_CLOSES = 1024
_BUILTIN_METHODS = frozenset((Env.reset, ToolEnv.step))
"""methods that an environment did not override; they never block, so they need no time limit"""


class ThreadPools:
    """The threads in which user code runs. All runners of a job share them, since a call that hangs keeps its thread."""

    def __init__(self, env_class: type[Env], save_output: SaveOutput | None = None, processes: int = 1) -> None:
        """See `ToolExecutor` for `save_output` and `processes`."""
        label, threads = env_class.label(), env_class.threads
        self.tool_executor = ToolExecutor(save_output, processes)
        self.env = TimeoutPool(f"env-{label}", threads=threads, max_abandoned=threads)
        self.closing = TimeoutPool(f"close-{label}", threads=threads, max_abandoned=_MAX_HUNG_CLOSES)
        """separate, so that environments can be closed when every other call hangs"""

    def close(self) -> None:
        """Let idle threads end; further calls start new ones."""
        self.tool_executor.close()
        self.env.close()
        self.closing.close()


class EnvInstance:
    """An environment from its constructor to its final state."""

    def __init__(self, make_env: Callable[[], Env], env_class: type[Env], pools: ThreadPools) -> None:
        self.env: Env | None = None
        self.tools: dict[str, ToolSpec] = {}
        self.state: Mapping[str, Any] = {}
        """what `Env.state` returned at the end"""
        self.state_lost = False
        """`Env.state` is overridden and failed"""
        self.close_failure: Failure | UsageError | None = None
        """the first failure of closing"""
        self._make_env, self._class, self._pools = make_env, env_class, pools
        self._construction: asyncio.Future[Env] | None = None

    async def create(self, seed: int, task: Task | None = None) -> None:
        """Call the environment's constructor and set the tools of the task up.

        Raises:
            EnvFailure: one of them failed or timed out.
        """
        pool, timeout_s = self._pools.env, self._class.timeout_s
        if constructor_is_trivial(self._make_env, self._class):
            env = self._make_env()
        else:
            self._construction = asyncio.ensure_future(pool.call(self._make_env, timeout_s=timeout_s))
            with boundary(EnvFailure, "env constructor"):
                env = await asyncio.shield(self._construction)
        self.env = env
        with boundary(EnvFailure, "tool constructor"):
            if any(map(inspect.isclass, env.tools)) or type(env).tool_specs is not Env.tool_specs:
                specs = await pool.call(task_tools, env, task, timeout_s=timeout_s)
            else:
                specs = task_tools(env, task)
        self.tools = {t.name: t for t in specs}
        with boundary(EnvFailure, "tool setup"):
            for tool in env.tool_instances:
                await pool.call(tool.setup, derive_seed(seed, "tool"), timeout_s=timeout_s)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the environment's methods under its time limit; sync methods run in a thread."""
        call = getattr(self.env, method)
        with boundary(EnvFailure, f"env {method}"):
            if getattr(call, "__func__", None) in _BUILTIN_METHODS:
                return await call(*args, **kwargs)
            return await self._pools.env.call(call, *args, timeout_s=self._class.timeout_s, **kwargs)

    async def close(self) -> None:
        """Read the final state, then close the tools and the environment. A failure does not stop the steps after it."""
        if self.env is None and self._construction is not None:  # cancelled in the constructor: close what it returns
            await asyncio.wait({self._construction})
            failed = self._construction.cancelled() or self._construction.exception()
            self.env = None if failed else self._construction.result()
        if self.env is None:
            return
        if type(self.env).state is not Env.state:
            state = await self._closing_call(EnvFailure, "env state", self.env.state, returns=Mapping)
            self.state, self.state_lost = dict(state or {}), state is None
        for tool in self.env.tool_instances:
            await self._closing_call(ToolFailure, "tool close", tool.close)
        if getattr(self.env.close, "__func__", None) is not Env.close:
            await self._closing_call(EnvFailure, "env close", self.env.close)

    async def _closing_call(
        self, kind: type[Failure], where: str, call: Callable[[], Any], returns: type = object
    ) -> Any:
        """The value of one closing call; None if it failed."""
        try:
            with boundary(kind, where):
                value = await self._pools.closing.call(call, timeout_s=self._class.timeout_s)
                if not isinstance(value, returns):
                    raise TypeError(f"state must return a mapping, found {type(value).__name__}")
                return value
        except (Failure, UsageError) as e:
            self.close_failure = self.close_failure or e
            return None
