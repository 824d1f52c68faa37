"""The tools of MCP servers: `--env 'mcp:uvx mcp-server-time'`, `--env mcp:https://host/mcp`. Tasks come from `--prompt-data`.

The target is a command, which is started for each episode that calls a tool and talks over stdin and stdout, or the URL of a server that speaks
streamable HTTP. Arguments (`--env-arg`): `more`, a list of further commands and URLs; `allow`, the names of the tools to show; `timeout_s`, of
a call; `concurrency`, the calls of one tool at the same time.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from agentrl.core.infra_errors import is_infra_error
from agentrl.env import ToolEnv
from agentrl.envs.adapters.base import Adapted
from agentrl.errors import ConfigError, InfraError, describe
from agentrl.tool import ToolLimits, ToolSpec
from agentrl.types import Task

_START_TIMEOUT_S = 60.0
"""time limit for starting a server and for the list of its tools"""


class McpServers(ToolEnv, Adapted):
    """The tools of one or more MCP servers. An answer without a call ends the episode; `--reward` scores it."""

    prefix, extra, example = "mcp", "mcp", "'uvx mcp-server-time'"

    def __init__(
        self,
        more: Sequence[str] = (),
        allow: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        concurrency: int = 64,
    ) -> None:
        self.limits = ToolLimits(timeout_s=timeout_s, max_concurrency=concurrency)
        self.allow = None if allow is None else set(allow)
        self.sessions = [Session(self.target), *map(Session, more)]

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """Require the client."""
        cls.package("mcp.client.client")
        return {}

    def check_ready(self) -> None:
        """Start each server once and list its tools.

        Raises:
            ConfigError: a server cannot be started or does not answer, or two have tools of one name.
        """
        owners: dict[str, str] = {}
        for session in self.sessions:
            try:
                tools = _tools_of(session.server)
            except InfraError as e:
                raise ConfigError(f"--env {self.label()}: {e}; start the server, or correct the command or URL") from e
            for name in (tool.name for tool in tools if self._shows(tool.name)):
                if name in owners:
                    raise ConfigError(
                        f"--env {self.label()}: both {owners[name]} and {session.server} have a tool {name!r}; "
                        "choose with --env-arg 'allow=[…]', or leave one server out"
                    )
                owners[name] = session.server
        missing = sorted((self.allow or set()) - owners.keys())
        if missing:
            raise ConfigError(
                f"--env {self.label()}: no server has the tool {missing[0]!r}; there are {', '.join(owners)}"
            )

    def tool_specs(self, task: Task | None = None) -> list[ToolSpec]:
        """The tools that the servers list."""
        specs = super().tool_specs(task)
        for session in self.sessions:
            for tool in _tools_of(session.server):
                if self._shows(tool.name):
                    specs.append(
                        ToolSpec(
                            tool.name,
                            tool.description or "",
                            dict(tool.input_schema),
                            session.function(tool.name),
                            limits=self.limits,
                            key=session.server,
                        )
                    )
        return specs

    def _shows(self, name: str) -> bool:
        return self.allow is None or name in self.allow

    async def close(self) -> None:
        """End the sessions and the processes of their servers."""
        for session in self.sessions:
            await session.close()


class Session:
    """The connection of one episode to one server. It is opened at the first call, and lives in a task that also closes it."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._done = asyncio.Event()

    def function(self, name: str) -> Callable[..., Awaitable[Any]]:
        """The function that calls a tool of the server."""

        async def call(**arguments: Any) -> Any:
            return await self.call(name, arguments)

        return call

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool.

        Returns:
            Its text, or a list of text and image parts.

        Raises:
            ToolError: the tool reports an error; the policy reads it.
            InfraError: the server died or does not answer.
        """
        client = await self._connected()
        call = asyncio.ensure_future(client.call_tool(name, arguments))
        assert self._task is not None
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise InfraError(f"the MCP server {self.server} ended the connection")
            result = await call
        except Exception as e:
            if isinstance(e, InfraError) or not (_is_refusal(e)):
                raise InfraError(f"the MCP server {self.server} failed: {describe(e)}") from e
            raise ToolError(str(e)) from e
        finally:
            call.cancel()
        content = _content(result)
        if result.is_error:
            raise ToolError(content if isinstance(content, str) else "the tool failed")
        return content

    async def _connected(self) -> Any:
        if self._task is None:
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._live(self._client))
        assert self._client is not None
        return await asyncio.shield(self._client)

    async def _live(self, connected: asyncio.Future[Any]) -> None:
        """Open the connection, keep it until `close`, and close it: all in one task, as the client's cancel scopes require."""
        try:
            async with _client(self.server) as client:
                connected.set_result(client)
                await self._done.wait()
        except Exception as e:  # noqa: BLE001  whatever a transport raises: the calls that wait for it report it
            if not connected.done():
                connected.set_exception(InfraError(f"the MCP server {self.server} does not start: {_reason(e)}"))
                with suppress(InfraError):
                    connected.exception()

    async def close(self) -> None:
        """Close the connection, if it was opened."""
        self._done.set()
        if self._task is not None:
            await asyncio.wait({self._task})


class ToolError(Exception):
    """A tool's own error, which the policy reads."""


def _client(server: str) -> Any:
    """A client of a server, not yet connected. Servers that run as processes inherit the environment, and their log is dropped."""
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if server.startswith(("http://", "https://")):
        return Client(server)
    try:
        command, *arguments = shlex.split(server)
    except ValueError as e:
        raise ConfigError(f"--env mcp:{server}: expected a command or a URL: {e}") from e
    log = open(os.devnull, "w")  # noqa: SIM115  the process keeps it
    return Client(
        stdio_client(StdioServerParameters(command=command, args=arguments, env=dict(os.environ)), errlog=log)
    )


@lru_cache(maxsize=256)
def _tools_of(server: str) -> tuple[Any, ...]:
    """The tools that a server lists; it is asked once per process, in a thread without an event loop.

    Raises:
        InfraError: it cannot be started or does not answer.
    """

    async def discover() -> tuple[Any, ...]:
        async with asyncio.timeout(_START_TIMEOUT_S), _client(server) as client:
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return tuple(tools)

    try:
        return asyncio.run(discover())
    except ConfigError:
        raise
    except Exception as e:  # whatever a transport raises
        raise InfraError(f"the MCP server {server} does not answer: {_reason(e)}") from e


def _is_refusal(error: BaseException) -> bool:
    """True if the server answered, with an error of the protocol: unknown tool, bad arguments."""
    code = getattr(getattr(error, "error", None), "code", None)
    return code is not None and code not in (-32000, -32001) and not is_infra_error(error)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)


def _content(result: Any) -> Any:
    """The texts of a result as one text, or its parts if it has images."""
    parts: list[dict[str, Any]] = []
    for item in result.content:
        if item.type == "text":
            parts.append({"type": "text", "text": item.text})
        elif item.type == "image":
            parts.append({"type": "image", "image": f"data:{item.mime_type};base64,{item.data}"})
        else:
            parts.append({"type": "text", "text": item.model_dump_json(exclude_none=True)})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)
