"""JSON Lines files: one JSON object per line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.file_lock import try_lock
from agentrl.errors import StoreError


def read_json_lines(path: Path) -> list[Any]:
    """Return the rows of a file without a half-written last line; [] if there is no file.

    Raises:
        StoreError: a line is not JSON.
    """
    raw = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            rows.append(orjson.loads(line))
        except ValueError as e:
            raise StoreError(f"{path}: line {number} is not JSON: {e}; restore the file or delete that line") from e
    return rows


class JsonLines:
    """A JSON Lines file that is flushed after each row and can be truncated to an earlier position."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            StoreError: another process is writing it.
        """
        self.path = path
        self._file = path.open("ab")
        if not try_lock(self._file):
            self._file.close()
            raise StoreError(f"{path} is being written by a run that is still active; stop that run first")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
        self._file.flush()

    def position(self) -> int:
        """Return the size of the file in bytes."""
        return self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Sync the file to disk."""
        os.fsync(self._file.fileno())

    def truncate(self, size: int) -> None:
        """Remove what follows byte `size`.

        Raises:
            StoreError: the file is shorter; it would be padded with NUL bytes.
        """
        if size > self.position():
            raise StoreError(
                f"{self.path} has {self.position()} bytes, expected at least {size}; restore it from a backup"
            )
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def rows(self) -> list[Any]:
        return read_json_lines(self.path)

    def close(self) -> None:
        self._file.close()
