"""A model behind an OpenAI-compatible address, which plays a role by text: a user simulator, or an opponent that a server serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import httpx

from agentrl.core.chat_answers import answer_text
from agentrl.errors import ConfigError, InfraError, shown
from agentrl.types import Message

KEY_VARIABLE = "OPENAI_API_KEY"
"""environment variable with the key that requests carry"""
CHECK_S = 10.0
"""time limit of the check before a run"""


class ChatModel:
    """Answers conversations by POST ADDRESS/chat/completions.

    Args:
        address: base address, such as http://host:8000/v1; with #NAME the model to ask, else the one that the server serves.
        temperature: of sampling.
        max_tokens: maximum tokens of an answer; None: the server's limit.
        timeout_s: limit of one request.
    """

    def __init__(
        self, address: str, *, temperature: float = 1.0, max_tokens: int | None = None, timeout_s: float = 120.0
    ) -> None:
        self.address, _, self._model = address.partition("#")
        self._sampling = {"temperature": temperature, **({} if max_tokens is None else {"max_tokens": max_tokens})}
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None
        self._naming = asyncio.Lock()

    async def reply(self, messages: Sequence[Message], *, seed: int) -> str:
        """The next message of the assistant of a conversation.

        Raises:
            InfraError: no answer, or one without text.
        """
        async with self._naming:
            self._model = self._model or await self._only_model(self._timeout_s)
        body = {"model": self._model, "messages": list(messages), "seed": seed % (1 << 31), **self._sampling}
        answer = await self._request("POST", "chat/completions", self._timeout_s, json=body)
        try:
            return answer_text(answer)
        except ValueError as e:
            raise InfraError(f"{self.address}: {e}") from e

    async def check(self, flag: str) -> None:
        """Ask the server whether it serves the model. `flag`: names the player in messages.

        Raises:
            ConfigError: it does not answer, or serves several and none is named.
        """
        try:
            models = await self._models(CHECK_S)
        except InfraError as e:
            raise ConfigError(f"{flag}: {e}; start the server, or correct the address") from e
        finally:
            await self.close()
        if self._model and models and self._model not in models:
            raise ConfigError(f"{flag}: it serves no model {self._model!r}; it serves {', '.join(models)}")
        if not self._model and len(models) != 1:
            raise ConfigError(f"{flag}: it serves {len(models)} models; name one: {self.address}#NAME")

    async def close(self) -> None:
        """Close the connections; another request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _only_model(self, timeout_s: float) -> str:
        models = await self._models(timeout_s)
        if len(models) != 1:
            raise InfraError(f"{self.address} serves {len(models)} models, and none is named")
        return models[0]

    async def _models(self, timeout_s: float) -> list[str]:
        answer = await self._request("GET", "models", timeout_s)
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError) as e:
            raise InfraError(f"{self.address}/models returned no list of models: {shown(answer, 200)}") from e

    async def _request(self, method: str, path: str, timeout_s: float, **more: Any) -> Any:
        if self._client is None:
            key = os.environ.get(KEY_VARIABLE)
            self._client = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            response = await self._client.request(
                method, f"{self.address.rstrip('/')}/{path}", timeout=timeout_s, **more
            )
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
            raise InfraError(f"no answer from {self.address}: {type(e).__name__}: {e}") from e
