"""The environment of one episode: created, called and closed. All user code runs under its time limit and off the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.core.timeout_pool import TimeoutPool
from agentrl.env import Env, ToolEnv, constructor_is_trivial, task_tools
from agentrl.errors import ContractError, EnvFailure, Failure, ToolFailure, UsageError, boundary
from agentrl.rollout.isolation.fork_server import ForkServer, modules_of
from agentrl.rollout.isolation.isolated_env import IsolatedEnv
from agentrl.rollout.isolation.isolated_tool import IsolatedFunction, IsolatedTool
from agentrl.rollout.tool_executor import SaveOutput, ToolExecutor
from agentrl.tool import Isolation, Tool, ToolSpec
from agentrl.types import Task

_MAX_HUNG_CLOSES = 1024
_BUILTIN_METHODS = frozenset((Env.reset, ToolEnv.step))
"""methods that an environment did not override; they never block, so they need no time limit"""


class ThreadPools:
    """The threads and processes in which user code runs. All runners of a job share them, since a call that hangs keeps its thread."""

    def __init__(
        self,
        env_class: type[Env],
        save_output: SaveOutput | None = None,
        processes: int = 1,
        isolation: Isolation | None = None,
    ) -> None:
        """See `ToolExecutor` for `save_output` and `processes`. `isolation`: takes precedence over the environment's own."""
        label, threads = env_class.label(), env_class.threads
        self.tool_executor = ToolExecutor(save_output, processes)
        self.env = TimeoutPool(f"env-{label}", threads=threads, max_abandoned=threads)
        self.closing = TimeoutPool(f"close-{label}", threads=threads, max_abandoned=_MAX_HUNG_CLOSES)
        """separate, so that environments can be closed when every other call hangs"""
        self.isolation = isolation or env_class.isolation
        self.fork_server = ForkServer(modules_of(env_class))
        self._functions: dict[Callable[..., Any], IsolatedFunction] = {}

    def isolated_function(self, spec: ToolSpec) -> IsolatedFunction:
        """The tool function in separate processes, which all episodes share."""
        assert spec.fn is not None, "calls of tools without a function are not made"
        if spec.fn not in self._functions:
            self._functions[spec.fn] = IsolatedFunction(spec.fn, spec.name, self.fork_server)
        return self._functions[spec.fn]

    def end_processes(self) -> None:
        """End the processes of user code; a further call starts others."""
        self.fork_server.close()

    def close(self) -> None:
        """Let idle threads end; further calls start new ones. Processes stay for the next rollout; see `end_processes`."""
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
        self._isolated: dict[int, Tool] = {}
        """what stands for a `Tool` in a separate process, by the id of the `Tool`"""

    async def create(self, seed: int, task: Task | None = None) -> None:
        """Call the environment's constructor and set the tools of the task up.

        Raises:
            EnvFailure: one of them failed or timed out.
            ContractError: a tool, or the isolation that it asks for, is not possible.
        """
        await self.construct(task)
        with boundary(EnvFailure, "tool setup"):
            for tool in self._tool_objects():
                await self._pools.env.call(tool.setup, derive_seed(seed, "tool"), timeout_s=self._class.timeout_s)

    async def construct(self, task: Task | None = None) -> None:
        """Call the constructors of the environment and its tools; see `create`."""
        specs = await (self._create_isolated(task) if self._pools.isolation == "process" else self._create_here(task))
        self.tools = {t.name: t for t in map(self._isolated_tool, specs)}

    async def _create_here(self, task: Task | None) -> list[ToolSpec]:
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
                specs: list[ToolSpec] = await pool.call(task_tools, env, task, timeout_s=timeout_s)
                return specs
            return task_tools(env, task)

    async def _create_isolated(self, task: Task | None) -> list[ToolSpec]:
        pool, timeout_s = self._pools.env, self._class.timeout_s
        self.env = env = IsolatedEnv(self._make_env, self._class, self._pools.fork_server)
        with boundary(EnvFailure, "env constructor"):
            await env.open()
            await pool.call(env.create, timeout_s=timeout_s)
        with boundary(EnvFailure, "tool constructor"):
            specs: list[ToolSpec] = await pool.call(env.isolated_tool_specs, task, timeout_s=timeout_s)
        return specs

    def _isolated_tool(self, spec: ToolSpec) -> ToolSpec:
        """The tool, called in a separate process if it asks for that and is not in one with its environment."""
        if spec.fn is None or spec.limits.isolation == "thread" or isinstance(self.env, IsolatedEnv):
            return spec
        owner = getattr(spec.fn, "__self__", None)
        if isinstance(owner, Tool):
            tool = IsolatedTool(owner, spec.name, self._pools.fork_server)
            self._isolated[id(owner)] = tool
            return replace(spec, fn=tool.run)
        if owner is self.env:
            raise ContractError(
                f"tool {spec.name}: a method of an environment runs where its environment runs; "
                f'set isolation = "process" on {self._class.label()}, or make the tool a function or a Tool'
            )
        return replace(spec, fn=self._pools.isolated_function(spec))

    def _tool_objects(self) -> list[Tool]:
        """The `Tool` objects to set up and close."""
        return [self._isolated.get(id(tool), tool) for tool in self.env.tool_instances] if self.env else []

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call one of the environment's methods under a time limit (None: its own); sync methods run in a thread."""
        call = getattr(self.env, method)
        with boundary(EnvFailure, f"env {method}"):
            if getattr(call, "__func__", None) in _BUILTIN_METHODS:
                return await call(*args, **kwargs)
            return await self._pools.env.call(call, *args, timeout_s=timeout_s or self._class.timeout_s, **kwargs)

    async def close(self, *, read_state: bool = True) -> None:
        """Read the final state, then close the tools and the environment. A failure does not stop the steps after it."""
        if self.env is None and self._construction is not None:  # cancelled in the constructor: close what it returns
            await asyncio.wait({self._construction})
            failed = self._construction.cancelled() or self._construction.exception()
            self.env = None if failed else self._construction.result()
        if self.env is None:
            return
        if read_state and type(self.env).state is not Env.state:
            state = await self._closing_call(EnvFailure, "env state", self.env.state, returns=Mapping)
            self.state, self.state_lost = dict(state or {}), state is None
        for tool in self._tool_objects():
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
