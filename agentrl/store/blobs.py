"""What is kept in files of its own beside the episodes, named by its hash: once, however many episodes hold it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import zstandard

from agentrl.core.message_images import Image, image_parts
from agentrl.errors import StoreError
from agentrl.types import Trajectory


class ImageFolder:
    """A folder of PNGs, each under the hash of its pixels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: set[str] = set()

    def write(self, images: Iterable[Image]) -> None:
        """Write those that are not there yet."""
        for image in images:
            if image.sha256 not in self._written:
                write_once(self.folder / f"{image.sha256}.png", image.png)
                self._written.add(image.sha256)


class Outputs:
    """A folder of tools' outputs of which the policy saw only the beginning, whole, each under its hash, compressed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, sha256: str, output: bytes) -> None:
        """Keep one."""
        write_once(self._file(sha256), zstandard.ZstdCompressor().compress(output))

    def read(self, sha256: str) -> str | None:
        """One as text; None: it was not kept.

        Raises:
            StoreError: its file is damaged.
        """
        file = self._file(sha256)
        if not re.fullmatch("[0-9a-f]{64}", sha256) or not file.exists():
            return None
        try:
            return zstandard.ZstdDecompressor().decompress(file.read_bytes()).decode("utf-8", "replace")
        except (OSError, zstandard.ZstdError) as e:
            raise StoreError(f"{file}: cannot be read: {e}") from e

    def _file(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.txt.zst"


def images_of(t: Trajectory) -> Iterator[Image]:
    """Every image that an episode's record names."""
    messages = [] if isinstance(t.task.prompt, str) else list(t.task.prompt)
    messages += chain.from_iterable(turn.observation.messages for turn in t.turns)
    messages += chain.from_iterable(turn.context or () for turn in t.turns)
    messages += ({"content": r.parts} for turn in t.turns for r in turn.action.results if r.parts)
    yield from (p.image for s in t.segments for p in s.images)
    yield from (p["image"] for p in image_parts(messages) if isinstance(p.get("image"), Image))


def write_once(path: Path, content: bytes) -> None:
    """Write a file whole, unless it is there: its name says what is in it. Safe with any number of writers."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(content)
    temporary.rename(path)
