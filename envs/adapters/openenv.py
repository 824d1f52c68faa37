"""OpenEnv environments on a server: `--env openenv:http://host:8000`. Each episode has a separate session.

Arguments (`--env-arg`): `act_by` (text or tool), `size` (tasks of a split), `prompt` (text before the first observation), `field` (the field of
the action that the policy's text fills, if it has several).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import httpx

from agentrl.envs.adapters.actions import ActBy, ActingEnv, Outcome, RefusedActionError, as_text, json_value
from agentrl.envs.adapters.base import seed_of, seed_tasks
from agentrl.errors import ConfigError, InfraError, describe
from agentrl.types import Task

_TIMEOUT_S = 10.0
_NOT_SHOWN = ("done", "reward", "metadata")


class OpenEnv(ActingEnv):
    """An environment that an OpenEnv server runs."""

    prefix, extra, example = "openenv", "openenv", "http://127.0.0.1:8000"

    def __init__(self, act_by: ActBy = "text", size: int = 1000, prompt: str = "", field: str = "") -> None:
        super().__init__(act_by)
        self.prompt, self.field = prompt, field
        self._client: Any = None

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """Require the client, and an address that can be one."""
        cls.package("openenv.core.generic_client")
        if not target.startswith(("http://", "https://")):
            raise ConfigError(f"--env openenv:{target}: expected the URL of a server, such as openenv:{cls.example}")
        return {}

    @classmethod
    def tasks(cls, split: str, size: int = 1000) -> Iterable[Task]:
        """Tasks that differ in the seed with which the server resets."""
        return seed_tasks("", split, size)

    async def check_ready(self) -> None:
        """Ask the server for the schema of its actions.

        Raises:
            ConfigError: it does not answer, or its actions have no field for the policy's text.
        """
        try:
            schema = await asyncio.to_thread(_action_schema, self.target)
        except InfraError as e:
            raise ConfigError(f"--env {self.label()}: {e}; start the server, or correct the address") from e
        if self.act_by == "text":
            _text_field(schema, self.field, self.label())

    async def reset(self, task: Task, *, seed: int, group_seed: int) -> str:
        """Open a session and reset it with the task's seed, else the group's."""
        self._schema = await asyncio.to_thread(_action_schema, self.target)
        self._client = self.package("openenv.core.generic_client").GenericEnvClient(self.target)
        result = await self._ask(self._client.reset(seed=seed_of(task, group_seed)))
        prompt = self.prompt or (task.prompt if isinstance(task.prompt, str) else "")
        return "\n\n".join(filter(None, [prompt, _shown(result.observation)])) or "The environment is ready."

    async def act(self, action: Any) -> Outcome:
        """Send the action to the session."""
        result = await self._ask(self._client.step(action))
        return Outcome(
            observation=_shown(result.observation) or "(no observation)",
            reward=float(result.reward or 0.0),
            terminated=bool(result.done),
        )

    async def close(self) -> None:
        """Close the session."""
        if self._client is not None:
            await self._client.disconnect()

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of the server's actions, without their metadata."""
        schema = _action_schema(self.target)
        properties = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        return {**schema, "properties": properties}

    def from_arguments(self, arguments: Mapping[str, Any]) -> Any:
        """The arguments are the action."""
        return dict(arguments)

    def parse(self, text: str) -> Any:
        """The action whose text field is the text, or that the text writes as JSON."""
        field = _text_field(self._schema, self.field, self.label())
        if field:
            return {field: text}
        try:
            value = json_value(text)
        except json.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise RefusedActionError(f"expected an action as JSON with the keys {', '.join(_fields(self._schema))}")
        return value

    async def _ask(self, request: Any) -> Any:
        """The server's answer.

        Raises:
            RefusedActionError: the server refuses the action.
            InfraError: the connection failed.
        """
        closed = self.package("websockets.exceptions").WebSocketException
        try:
            return await request
        except (OSError, TimeoutError, closed) as e:
            raise InfraError(f"the OpenEnv server {self.target} failed: {describe(e)}") from e
        except RuntimeError as e:  # what the client raises for an error that the server reports
            if "VALIDATION_ERROR" in str(e):
                raise RefusedActionError(str(e)) from e
            raise InfraError(f"the OpenEnv server {self.target} failed: {describe(e)}") from e


def _shown(observation: Any) -> str:
    if isinstance(observation, Mapping):
        observation = {k: v for k, v in observation.items() if k not in _NOT_SHOWN and v is not None}
        return as_text(observation) if observation else ""
    return as_text(observation)


@lru_cache(maxsize=64)
def _action_schema(url: str) -> dict[str, Any]:
    """The JSON schema of the server's actions.

    Raises:
        InfraError: the server does not answer.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=_TIMEOUT_S)
        answer.raise_for_status()
        schema: dict[str, Any] = answer.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as e:
        raise InfraError(f"the OpenEnv server {url} does not answer: {describe(e)}") from e
    return schema


def _fields(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in schema.get("properties", {}) if name != "metadata"]


def _text_field(schema: Mapping[str, Any], chosen: str, label: str) -> str:
    """The field that the policy's text fills; empty: the text is the whole action as JSON.

    Raises:
        ConfigError: the chosen field does not exist.
    """
    fields = _fields(schema)
    if chosen:
        if chosen not in fields:
            raise ConfigError(f"--env {label}: its actions have no field {chosen!r}; they have {', '.join(fields)}")
        return chosen
    texts = [name for name in fields if schema["properties"][name].get("type") == "string"]
    required = [name for name in schema.get("required", ()) if name in fields]
    return texts[0] if len(texts) == 1 and required in ([], texts) else ""
