"""What an episode begins with: the task's images, and a first prompt in which the policy sees every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.core.message_images import image_parts, load_images
from agentrl.env import Env
from agentrl.errors import ContractError, TemplateError
from agentrl.render import Renderer
from agentrl.types import EpisodeSpec, Message


async def load_task_images(spec: EpisodeSpec) -> EpisodeSpec:
    """The spec with the images of its task's prompt as `Image` objects."""
    prompt = spec.task.prompt
    if isinstance(prompt, str) or next(image_parts(prompt), None) is None:
        return spec
    return replace(spec, task=replace(spec.task, prompt=tuple(await load_images(prompt))))


def require_whole_prompt(
    env_class: type[Env], renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a first observation with calls that the policy would not see. Tasks' own messages are checked before the run.

    Raises:
        ContractError: the chat template leaves a call, or a content beside one, out.
    """
    if not any(m.get("tool_calls") for m in messages):
        return
    try:
        renderer.require_whole(messages, tools)
    except TemplateError as e:
        raise ContractError(f"{env_class.label()}.reset: {e}") from e
