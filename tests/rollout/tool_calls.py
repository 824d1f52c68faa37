"""Calls of tools by an executor."""

import asyncio

from agentrl.tool import spec_of
from agentrl.types import Action, ToolCall

SOON_S = 10.0


def specs(*fns):
    return {s.name: s for s in map(spec_of, fns)}


def call(name, /, **arguments):
    return ToolCall(name, arguments, f"call_{name}")


async def run(tool_executor, fn, /, **arguments):
    """The one result of calling a function as a tool."""
    spec = spec_of(fn)
    action = await asyncio.wait_for(
        tool_executor.execute({spec.name: spec}, Action("x", (call(spec.name, **arguments),))), 4 * SOON_S
    )
    (result,) = action.results
    return result
