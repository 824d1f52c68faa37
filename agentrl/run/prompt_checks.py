"""Checks that the chat template can render an environment's prompts, tools and tool results."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.env import Env
from agentrl.errors import TemplateError
from agentrl.render import Renderer
from agentrl.tool import tool_names


def check_prompts(env_class: type[Env], renderer: Renderer, where: str) -> None:
    """Refuse an environment whose system prompt, tools or tool results the chat template cannot render. `where`: the model's folder.

    Raises:
        TemplateError: one of them cannot be rendered.
    """
    if env_class.system_prompt:
        renderer.check(("system",))
    check_tools(env_class, renderer, tool_names(env_class), where)


def check_tools(env_class: type[Env], renderer: Renderer, tools: Sequence[str], where: str) -> None:
    """Refuse tools that the policy would not see. `where`: the model's folder.

    Raises:
        TemplateError: the chat template omits tools, or cannot render their results.
    """
    if not tools or renderer.format.inline:
        return
    renderer.check(("tool",))
    described = env_class.shows_tools or all(name in (env_class.system_prompt or "") for name in tools)
    if renderer.format.needs_tools and not renderer.shows_tools and not described:
        raise TemplateError(
            f"{where}: its chat template omits tools, so the policy would not see {', '.join(tools)} of environment "
            f"{env_class.label()}; give --tools-in-prompt, or "
            "describe them in its system_prompt, or set shows_tools = True if its other prompts describe them"
        )
