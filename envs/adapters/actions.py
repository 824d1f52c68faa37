"""Environments whose actions are values: the policy writes an action as text, or calls the tool `act`."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from agentrl.env import overridable
from agentrl.envs.adapters.base import Adapted
from agentrl.errors import ConfigError
from agentrl.tool import ToolSpec
from agentrl.types import Action, Message, StepResult, Task

ActBy = Literal["text", "tool"]


class RefusedActionError(ValueError):
    """What the policy wrote is not an action; the message is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an action led to."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


class ActingEnv(Adapted):
    """An environment whose actions are values. Subclasses define `parameters`, `parse` and `act`.

    Args:
        act_by: 'text': the action is the text after the last 'Action:', else the whole text. 'tool': the policy calls the tool `act`.
    """

    def __init__(self, act_by: ActBy = "text") -> None:
        if act_by not in ("text", "tool"):
            raise ConfigError(f"{self.label()}: act_by must be text or tool, found {act_by!r}")
        self.act_by = act_by

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments of the tool `act`."""
        raise NotImplementedError

    def parse(self, text: str) -> Any:
        """The action that a text writes.

        Raises:
            RefusedActionError: it writes none.
        """
        raise NotImplementedError

    def from_arguments(self, arguments: Mapping[str, Any]) -> Any:
        """The action in the arguments of a call.

        Raises:
            RefusedActionError: they are not an action.
        """
        raise NotImplementedError

    @overridable
    async def act(self, action: Any) -> Outcome:
        """Take an action.

        Raises:
            RefusedActionError: the environment does not accept it.
        """
        raise NotImplementedError

    def tool_specs(self, task: Task | None = None) -> list[ToolSpec]:
        """The tool `act`, if the policy acts by it."""
        if self.act_by == "text":
            return super().tool_specs(task)
        return [*super().tool_specs(task), ToolSpec("act", "Take an action and read what follows.", self.parameters)]

    async def step(self, action: Action) -> StepResult:
        """Take the action that the policy wrote, or those that it called for until one ends the episode."""
        if self.act_by == "text":
            return await self._text_step(action)
        if not action.calls:
            return StepResult("Call the tool act.")
        messages: list[Message] = []
        reward = 0.0
        for call in action.calls:
            outcome = await self._outcome(partial(self.from_arguments, call.arguments))
            reward += outcome.reward
            messages.append(
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": outcome.observation}
            )
            if outcome.terminated or outcome.truncated:
                return StepResult(messages, reward, outcome.terminated, outcome.truncated)
        return StepResult(messages, reward)

    async def _text_step(self, action: Action) -> StepResult:
        text = action.answer if action.answer is not None else action.text
        outcome = await self._outcome(lambda: self.parse(text.rpartition("Action:")[2].strip()))
        return StepResult(outcome.observation, outcome.reward, outcome.terminated, outcome.truncated)

    async def _outcome(self, read: Callable[[], Any]) -> Outcome:
        try:
            value = read()
            return await (
                self.act(value) if inspect.iscoroutinefunction(self.act) else asyncio.to_thread(self.act, value)
            )
        except RefusedActionError as e:
            return Outcome(observation=f"error: {e}")


def json_value(text: str) -> Any:
    """A JSON value, possibly in a code fence.

    Raises:
        ValueError: the text is not JSON.
    """
    bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    return json.loads(bare)


def as_text(value: Any) -> str:
    """A value as an observation: text unchanged, an object as a line for each key, the rest as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        texts = {
            key: part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for key, part in value.items()
        }
        return next(iter(texts.values())) if len(texts) == 1 else "\n".join(f"{k}: {v}" for k, v in texts.items())
    return json.dumps(value, ensure_ascii=False)
