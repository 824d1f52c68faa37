"""Tools that run a policy's code in a sandbox: Python with variables that stay, and a shell.

Each episode has its own sandbox. For a sandbox that several tools share, or for files in and out, an environment makes an
`agentrl.sandbox.Sandbox` itself, calls it in `@tool` methods and closes it in `close`.
"""

from __future__ import annotations

from typing import ClassVar

from agentrl.sandbox import Backend, Sandbox, SandboxLimits
from agentrl.tool import Tool, ToolLimits


class _SandboxTool(Tool):
    limits: ClassVar[ToolLimits] = ToolLimits(timeout_s=120.0, max_concurrency=16)
    """of the calls; the code's own limits are those of the sandbox"""

    def __init__(
        self, limits: SandboxLimits | None = None, backend: str | Backend = "auto", *, packages: bool = False
    ) -> None:
        """See `agentrl.sandbox.Sandbox`. The tool can be listed as a class too: `tools = [Python]`."""
        self._settings = limits, backend, packages
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """This episode's sandbox."""
        if self._sandbox is None:
            limits, backend, packages = self._settings
            self._sandbox = Sandbox(limits, backend, packages=packages)
        return self._sandbox

    async def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.close()


class Python(_SandboxTool):
    """Runs Python code in a sandbox. Variables stay from call to call.

    Example:
        >>> from agentrl import ToolEnv
        >>> class Calculate(ToolEnv):
        ...     tools = [Python]
        >>> [spec.name for spec in Calculate().tool_specs()]
        ['python']
    """

    name = "python"

    async def call(self, code: str) -> str:
        """Run Python code and return what it prints. The value of the last expression is printed. Variables stay from call to call.

        Args:
            code: the code to run
        """
        return (await self.sandbox.python(code)).text()


class Shell(_SandboxTool):
    """Runs shell commands in a sandbox. Files, the folder and exported variables stay from call to call."""

    name = "shell"

    async def call(self, command: str) -> str:
        """Run a shell command and return its output. Files, the folder and exported variables stay from call to call.

        Args:
            command: the command to run
        """
        return (await self.sandbox.shell(command)).text()
