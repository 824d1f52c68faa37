"""Runs code that nobody trusts, such as a policy's, under limits of time, CPU, memory, processes, files and network."""

from agentrl.sandbox.backends import Backend, Container, Namespaces, ProcessLimits, choose_backend
from agentrl.sandbox.limits import SandboxLimits
from agentrl.sandbox.sandbox import RunResult, Sandbox

__all__ = [
    "Backend",
    "Container",
    "Namespaces",
    "ProcessLimits",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "choose_backend",
]
