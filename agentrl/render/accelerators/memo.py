"""Results kept by key, up to a total size. The fallback is to compute them again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """A dictionary that forgets its oldest entries when their total size exceeds `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._entries: dict[K, tuple[V, int]] = {}

    def get(self, key: K) -> V | None:
        """The value kept under a key, or None."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Keep a value, unless it alone exceeds the limit."""
        if key in self._entries:
            self.size -= self._entries.pop(key)[1]
        if size > self.limit:
            return
        while self.size + size > self.limit:
            self.size -= self._entries.pop(next(iter(self._entries)))[1]
        self._entries[key] = value, size
        self.size += size
