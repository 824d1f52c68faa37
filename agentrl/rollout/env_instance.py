"""One episode's environment: made, called and closed. User code runs here alone, under its time limit and never on the event loop's time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.core.seeds import derive_seed
from agentrl.core.timeout_pool import Pool
from agentrl.env import Env, ToolEnv, is_plain
from agentrl.errors import EnvFailure, Failure, ToolFailure, UsageError, boundary
from agentrl.rollout.tool_executor import Keep, ToolExecutor
from agentrl.tool import ToolSpec

_MAX_HUNG_CLOSES = 1024
_OWN = frozenset((Env.reset, ToolEnv.step))
"""methods that an environment did not override: they never block, so they need no time limit"""


class Pools:
    """Where user code runs. One for all runners of a job, since what hangs goes on hanging from rollout to rollout."""

    def __init__(self, env_class: type[Env], keep: Keep | None = None, processes: int = 1) -> None:
        """`keep` is given tools' outputs that were cut, whole; `processes`: how many like this one share the tools' limits."""
        label, threads = env_class.label(), env_class.threads
        self.tool_executor = ToolExecutor(keep, processes)
        self.env = Pool(f"env-{label}", threads=threads, max_abandoned=threads)
        self.closing = Pool(f"close-{label}", threads=threads, max_abandoned=_MAX_HUNG_CLOSES)
        """of its own, so that closing goes on when every other call hangs"""

    def close(self) -> None:
        """Let idle threads end; further calls start new ones."""
        self.tool_executor.close()
        self.env.close()
        self.closing.close()


class EnvInstance:
    """An environment from its constructor to its last state."""

    def __init__(self, make_env: Callable[[], Env], env_class: type[Env], pools: Pools) -> None:
        self.env: Env | None = None
        self.tools: dict[str, ToolSpec] = {}
        self.state: Mapping[str, Any] = {}
        """what the environment said of itself in the end"""
        self.state_lost = False
        """it has a state and could not say it"""
        self.close_failure: Failure | UsageError | None = None
        """why closing failed, if it did"""
        self._make_env, self._class, self._pools = make_env, env_class, pools
        self._making: asyncio.Future[Env] | None = None

    async def make(self, seed: int) -> None:
        """Call the environment's constructor, and set its tools up.

        Raises:
            EnvFailure: one of them failed, or took too long.
        """
        pool, timeout_s = self._pools.env, self._class.timeout_s
        if is_plain(self._make_env, self._class):
            self.env = self._make_env()
        else:
            self._making = asyncio.ensure_future(pool.call(self._make_env, timeout_s=timeout_s))
            with boundary(EnvFailure, "env constructor"):
                self.env = await asyncio.shield(self._making)
        with boundary(EnvFailure, "tool constructor"):
            if any(map(inspect.isclass, self.env.tools)):
                specs = await pool.call(self.env.tool_specs, timeout_s=timeout_s)
            else:
                specs = self.env.tool_specs()
        self.tools = {t.name: t for t in specs}
        with boundary(EnvFailure, "tool setup"):
            for tool in self.env.tool_instances:
                await pool.call(tool.setup, derive_seed(seed, "tool"), timeout_s=timeout_s)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the environment's methods under its time limit, off the event loop if it is sync."""
        call = getattr(self.env, method)
        with boundary(EnvFailure, f"env {method}"):
            if getattr(call, "__func__", None) in _OWN:
                return await call(*args, **kwargs)
            return await self._pools.env.call(call, *args, timeout_s=self._class.timeout_s, **kwargs)

    async def close(self) -> None:
        """Take the environment's last state, then close its tools and itself. What fails here stops nothing that follows."""
        if self.env is None and self._making is not None:  # cut off in the constructor: what it makes is closed too
            await asyncio.wait({self._making})
            self.env = None if self._making.cancelled() or self._making.exception() else self._making.result()
        if self.env is None:
            return
        if type(self.env).state is not Env.state:
            state = await self._finish(EnvFailure, "env state", self.env.state, gives=Mapping)
            self.state, self.state_lost = dict(state or {}), state is None
        for tool in self.env.tool_instances:
            await self._finish(ToolFailure, "tool close", tool.close)
        if getattr(self.env.close, "__func__", None) is not Env.close:
            await self._finish(EnvFailure, "env close", self.env.close)

    async def _finish(self, kind: type[Failure], where: str, call: Callable[[], Any], gives: type = object) -> Any:
        """Make one closing call; None if it failed."""
        try:
            with boundary(kind, where):
                value = await self._pools.closing.call(call, timeout_s=self._class.timeout_s)
                if not isinstance(value, gives):
                    raise TypeError(f"state must return a mapping, found {type(value).__name__}")
                return value
        except (Failure, UsageError) as e:
            self.close_failure = self.close_failure or e
            return None
