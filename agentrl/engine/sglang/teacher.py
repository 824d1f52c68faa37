"""A model on an SGLang server that scores token ids, for distillation."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.engine.sglang.api import ServerApi

TIMEOUT_S = 600.0
"""limit of one request"""


class ServedTeacher:
    """The model of the server at `address`, which is connected to at the first score."""

    def __init__(self, address: str) -> None:
        self._api = ServerApi(address, TIMEOUT_S)
        self._connected = False

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of ids[1:]; see `Teacher` of train/distillation.py.

        Raises:
            EngineFailure: no answer, or a malformed one.
        """
        if not self._connected:
            await self._api.connect()
            self._connected = True
        return await self._api.score(ids)

    async def close(self) -> None:
        """Close the connections. The server continues."""
        await self._api.close()
