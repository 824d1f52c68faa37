"""The adapters that one server was given. Each version has another name at the server, so that no request can be answered by another version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.sglang.api import ServerApi
from agentrl.errors import EngineFailure


class LoadedAdapter(NamedTuple):
    """What a server has of one of several adapters."""

    version: int
    name: str
    """at the server"""


class LoadedAdapters:
    """The current adapters of one server, and the names that it may still have.

    Args:
        client_id: tells the names from those of other clients.
    """

    def __init__(self, client_id: str) -> None:
        self.current: dict[str, LoadedAdapter] = {}
        self._former: dict[str, LoadedAdapter] = {}
        """what it had before; requests that wait in front of its scheduler may still name it"""
        self._names: set[str] = set()
        """those that the server has, or may have: a load failed, its adapters were not the trainer's, or it was started again"""
        self._client_id, self._loads = client_id, 0

    def forget(self) -> None:
        """Send all of them again at the next load, which also unloads those that the server may still have."""
        self.current, self._former = {}, {}

    async def load(self, api: ServerApi, adapters: Mapping[str, tuple[int, Path]]) -> None:
        """Load the versions in these folders, by name, and unload what no request can name any more.

        Raises:
            EngineFailure: the server refused a command.
        """
        kept = {loaded.name for loaded in (*self.current.values(), *self._former.values())}
        left = self._names - kept
        for name in left:
            with suppress(EngineFailure):  # a server that was started again does not have it
                await self._command(api, "unload", name)
        for adapter, (version, folder) in adapters.items():
            self._loads += 1
            new = LoadedAdapter(version, f"{adapter}-{version}-{self._client_id}-{self._loads}")
            self._names.add(new.name)
            await self._command(api, "load", new.name, folder)
            if (former := self._former.pop(adapter, None)) is not None:
                await self._command(api, "unload", former.name)
                self._names.discard(former.name)
            if (before := self.current.get(adapter)) is not None:
                self._former[adapter] = before
            self.current[adapter] = new
        self._names -= left  # the server answers, so it has answered those too

    async def discard(self, api: ServerApi) -> Iterable[str]:
        """Unload all of them; returns the names that the server may still have, which the next load unloads."""
        self.forget()
        for name in sorted(self._names):
            with suppress(EngineFailure):
                await self._command(api, "unload", name)
                self._names.discard(name)
        return sorted(self._names)

    @staticmethod
    async def _command(api: ServerApi, verb: str, name: str, folder: Path | None = None) -> None:
        place = {} if folder is None else {"lora_path": str(folder)}
        await api.command(f"/{verb}_lora_adapter", {"lora_name": name, **place})
