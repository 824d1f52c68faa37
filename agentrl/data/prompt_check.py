"""What the policy would see of a task's prompt: whole, or refused; short enough for the context, or counted and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentrl.core.message_images import image_parts
from agentrl.env import Env
from agentrl.render import Renderer
from agentrl.tool import declared_tools
from agentrl.types import Message, Task

_NAMED = 5
"""tasks that are named"""
_MESSAGE_TOKENS = 64
"""more tokens than any template writes around a message"""


class PromptCheck:
    """Checks the prompts of tasks before a run.

    A prompt is known before the episode if the environment does not override `reset`. Of other environments only the task's own messages are
    measured.

    Args:
        renderer: renders the prompts.
        env_class: the environment.
    """

    def __init__(self, renderer: Renderer, env_class: type[Env]) -> None:
        self._renderer = renderer
        system = env_class.system_prompt
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.exact = env_class.reset is Env.reset
        """whether the task's messages are the first observation"""
        self.context_length: int | None = None
        """tokens that fit into the context; None: not limited"""
        self.tools: Sequence[Mapping[str, Any]] = ()
        """the schemas of the environment's tools"""
        self._base: int | None = None

    def require_whole(self, task: Task) -> int:
        """Refuse a prompt of which the template leaves a content or a call out; returns the number of messages whose reasoning is left out.

        Raises:
            TemplateError: it leaves one out, or refuses the conversation.
        """
        if isinstance(task.prompt, str) or not self.exact:
            return 0
        return self._renderer.require_whole(task.messages, self._schemas(task)).reasoning

    def excess(self, task: Task) -> int | None:
        """The tokens of the task's prompt if they leave no room in the context; None: there is room, or it is not known (images)."""
        limit = self.context_length
        if limit is None or next(image_parts(task.messages), None) is not None:
            return None
        own = orjson.dumps((task.messages, task.metadata.get("tools")), default=str)
        # a token has at least one byte, and JSON writes no text in fewer bytes than it has
        if self._overhead() + 2 * len(own) + _MESSAGE_TOKENS * len(task.messages) < limit:
            return None
        messages = [*self._system, *task.messages]
        tokens = sum(len(ids) for _, ids in self._renderer.prompt(messages, self._schemas(task)))
        return tokens if tokens >= limit else None

    def _overhead(self) -> int:
        """The tokens of the shortest prompt, with the environment's tools."""
        if self._base is None:
            pieces = self._renderer.prompt([*self._system, {"role": "user", "content": "x"}], list(self.tools))
            self._base = sum(len(ids) for _, ids in pieces)
        return self._base

    def _schemas(self, task: Task) -> list[Mapping[str, Any]]:
        names = {tool["function"]["name"] for tool in self.tools}
        own = declared_tools(task.metadata.get("tools") or ())
        return [*self.tools, *(spec.schema for spec in own if spec.name not in names)]

    def sentence(self, source: str, rows: int, long: Sequence[tuple[str, int]], *, left_out: bool) -> str:
        """The prompts without room (the place and the tokens of each) in words, and what to do."""
        named = "; ".join(f"{where}: {tokens}" for where, tokens in long[:_NAMED]) + (
            "; …" if len(long) > _NAMED else ""
        )
        if left_out:
            what = "they are left out"
        elif self.exact:
            what = "they are kept, and their episodes end without a sampled token"
        else:
            what = "they are kept, as the environment may shorten them"
        return (
            f"{source}: {len(long)} of {rows} prompts take at least the {self.context_length} tokens of the context: {what} "
            f"({named}); raise --rollout-max-context-len, or shorten the prompts"
        )
