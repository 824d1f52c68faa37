"""An environment in a separate process, and what stands for it in the controller."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.core.timeout_pool import pure
from agentrl.env import Env, ObservationLike, takes_group_seed, task_tools
from agentrl.errors import EnvFailure
from agentrl.rollout.isolation.fork_server import START_TIMEOUT_S, ForkServer, UserProcess, UserProcessError, modules_of
from agentrl.tool import BadArgumentsError, Tool, ToolLimits, ToolSpec
from agentrl.types import Action, StepResult, Task

INTERRUPTED_GRACE_S = 10.0
"""Time limit of `state` and of `close` in a process in which a call was interrupted, and may still run."""


@dataclass(frozen=True)
class ToolDescription:
    """A tool of an environment in another process."""

    name: str
    description: str
    parameters: dict[str, Any]
    limits: ToolLimits
    has_function: bool
    bound: bool
    """its function is a method of an object, which calls may change"""


@dataclass(frozen=True)
class BadArguments:
    """Returned instead of a tool's result: the arguments do not fit its schema."""

    message: str


class EnvHost:
    """Holds an environment in its process."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        self._make_env = make_env
        self._env: Any = None
        self._specs: dict[str, ToolSpec] = {}

    def prepare(self, operation: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """See `Host`."""
        own: dict[str, Callable[[], Any]] = {"create": self._create, "tool_specs": partial(self._describe_tools, *args)}
        if operation in own:
            return own[operation]
        if operation == "tool":
            return self._tool_call(*args)
        if operation in ("tool setup", "tool close"):
            tool = self._env.tool_instances[args[0]]
            return partial(tool.close) if operation == "tool close" else partial(tool.setup, args[1])
        return partial(getattr(self._env, operation), *args, **kwargs)

    def _create(self) -> tuple[str, ...]:
        self._env = self._make_env()
        return tuple(self._env.roles)

    def _describe_tools(self, task: Task | None = None) -> tuple[list[ToolDescription], int]:
        """The tools, and the number of `Tool` objects to set up and close."""
        self._specs = {spec.name: spec for spec in task_tools(self._env, task)}
        tools = [
            ToolDescription(s.name, s.description, s.parameters, s.limits, s.fn is not None, hasattr(s.fn, "__self__"))
            for s in self._specs.values()
        ]
        return tools, len(self._env.tool_instances)

    def _tool_call(self, name: str, given: Mapping[str, Any]) -> Callable[[], Any]:
        spec = self._specs[name]
        assert spec.fn is not None, "calls of tools without a function are not made"
        try:
            return partial(spec.fn, **spec.arguments(given))
        except BadArgumentsError as e:
            return pure(partial(BadArguments, str(e)))


class IsolatedEnv(Env):
    """Stands for an environment that runs in a separate process."""

    def __init__(self, make_env: Callable[[], Env], env_class: type[Env], server: ForkServer) -> None:
        self._make_env, self._class, self._server = make_env, env_class, server
        self._process: UserProcess | None = None
        self.timeout_s = env_class.timeout_s  # type: ignore[misc]
        if inspect.isfunction(inspect.getattr_static(env_class, "context_policy")):
            self.context_policy = partial(self._call, "context_policy")  # type: ignore[misc]
        else:
            self.context_policy = env_class.context_policy  # type: ignore[misc]

    async def open(self) -> None:
        """Start the process; see `ForkServer.open`."""
        where = f"environment {self._class.label()}"
        async with asyncio.timeout(START_TIMEOUT_S):
            self._process = await self._server.open(partial(EnvHost, self._make_env), where, modules_of(self._class))

    async def create(self) -> None:
        """Construct the environment in the process."""
        self.roles = await self._call("create")

    async def reset(self, task: Task, *, seed: int, group_seed: int | None = None) -> ObservationLike:
        """See `Env.reset`."""
        seeds = {"seed": seed, **({"group_seed": group_seed} if takes_group_seed(self._class) else {})}
        first: ObservationLike = await self._call("reset", task, **seeds)
        return first

    async def step(self, action: Action) -> StepResult:
        """See `Env.step`."""
        result: StepResult = await self._call("step", action)
        return result

    async def state(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Env.state`."""
        if self._class.state is Env.state:
            return {}
        state: Mapping[str, Any] = await self._closing_call("state")
        return state

    async def close(self) -> None:
        """Close the environment, then kill its process and everything that it started."""
        process = self._process
        if process is None:
            return
        try:
            if process.how_it_ended is None and self._class.close is not Env.close:
                await self._closing_call("close")
        finally:
            await process.close()

    async def check_ready(self) -> None:
        """See `Env.check_ready`."""
        await self._call("check_ready")

    async def isolated_tool_specs(self, task: Task | None) -> list[ToolSpec]:
        """The tools of this instance for a task, called in its process."""
        tools, count = await self._call("tool_specs", task)
        self.tool_instances.extend(_ToolObject(self._closing_call, self._call, i) for i in range(count))
        return [
            _IsolatedSpec(
                t.name,
                t.description,
                t.parameters,
                _ToolCall(self, t.name).function(t) if t.has_function else None,
                limits=t.limits,
                key=self._class.__qualname__,
            )
            for t in tools
        ]

    async def call_tool(self, name: str, given: Mapping[str, Any]) -> Any:
        """Call a tool in the process. A process that ends is an error that the policy reads; the episode fails at its next step."""
        assert self._process is not None, "create comes first"
        value = await self._process.call("tool", name, given)
        if isinstance(value, BadArguments):
            raise BadArgumentsError(value.message)
        return value

    async def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        assert self._process is not None, "create comes first"
        try:
            return await self._process.call(operation, *args, **kwargs)
        except UserProcessError as e:
            raise EnvFailure(f"env {operation}: {e}") from e

    async def _closing_call(self, operation: str, *args: Any) -> Any:
        """A call at the end of the episode, which does not wait long behind a call that hangs."""
        interrupted = self._process is not None and self._process.interrupted
        try:
            async with asyncio.timeout(INTERRUPTED_GRACE_S if interrupted else None):
                return await self._call(operation, *args)
        except TimeoutError as e:
            if not interrupted:
                raise
            raise EnvFailure(
                f"env {operation}: the process did not respond within {INTERRUPTED_GRACE_S:g} s after a call hung"
            ) from e


class _IsolatedSpec(ToolSpec):
    """Arguments are validated in the process of the tool."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"given": dict(given)}


class _ToolCall:
    """A tool of an environment in another process, as a function."""

    def __init__(self, env: IsolatedEnv, name: str) -> None:
        self._env, self._name = env, name

    async def __call__(self, given: Mapping[str, Any]) -> Any:
        return await self._env.call_tool(self._name, given)

    def function(self, tool: ToolDescription) -> Callable[..., Any]:
        """A bound method if the tool's own function is one, as replay distinguishes them."""
        return self.__call__ if tool.bound else self


class _ToolObject(Tool):
    """One of the `Tool` objects of an environment in another process."""

    def __init__(self, closing_call: Callable[..., Any], call: Callable[..., Any], index: int) -> None:
        self._closing_call, self._call, self._index = closing_call, call, index

    async def setup(self, seed: int) -> None:
        await self._call("tool setup", self._index, seed)

    async def close(self) -> None:
        await self._closing_call("tool close", self._index)
