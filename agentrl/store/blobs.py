"""Content-addressed files beside the episodes: each is stored once, under its hash, however many episodes refer to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from pathlib import Path

import zstandard

from agentrl.core.atomic_write import new_file, sync
from agentrl.core.message_images import Image, image_parts
from agentrl.core.plain_files import read_plain_file
from agentrl.errors import StoreError
from agentrl.store.zstd import decompress
from agentrl.types import Trajectory

IMAGES, EXPERTS = "images", "routed_experts"
"""names of folders beside the data files"""


class ImageFolder:
    """PNG files, each named by the hash of its pixels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: set[str] = set()

    def write(self, images: Iterable[Image]) -> None:
        """Write the images that the folder does not hold yet."""
        for image in images:
            if image.sha256 not in self._written:
                if not is_hash(image.sha256):
                    raise StoreError(f"an image cannot be stored under the name {image.sha256!r:.80}: it is not a hash")
                _write_once(self.folder / f"{image.sha256}.png", image.png)
                self._written.add(image.sha256)


class ExpertsFolder:
    """The routed experts of segments, each compressed and named by its hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, trajectory: Trajectory) -> None:
        """Write those of an episode."""
        for segment in trajectory.segments:
            if segment.routed_experts is not None:
                compressed = zstandard.ZstdCompressor().compress(segment.routed_experts.content)
                _write_once(experts_file(self.folder, segment.routed_experts.sha256), compressed)


def experts_file(folder: Path, sha256: str) -> Path:
    """The file of routed experts in its folder."""
    return folder / f"{sha256}.zst"


class Outputs:
    """Complete tool outputs of which the policy read only the beginning, each compressed and named by its hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, sha256: str, output: bytes) -> None:
        _write_once(self._file(sha256), zstandard.ZstdCompressor().compress(output))

    def read(self, sha256: str) -> str | None:
        """Return an output as text, or None if it was not stored.

        Raises:
            StoreError: its file is damaged.
        """
        file = self._file(sha256)
        if not is_hash(sha256) or not file.exists():
            return None
        try:
            compressed = read_plain_file(file)
        except OSError as e:
            raise StoreError(f"{file}: the tool output cannot be read: {e}") from e
        return decompress(compressed, f"{file}: the tool output").decode("utf-8", "replace")

    def _file(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.txt.zst"


def is_hash(name: str) -> bool:
    """Whether a name is a SHA-256. Names come from records; any other could lead out of the folder."""
    return re.fullmatch("[0-9a-f]{64}", name) is not None


def images_of(trajectory: Trajectory) -> Iterator[Image]:
    """Yield every image that the record of an episode refers to."""
    task, turns = trajectory.task, trajectory.turns
    messages = [] if isinstance(task.prompt, str) else list(task.prompt)
    messages += chain.from_iterable(turn.observation.messages for turn in turns)
    messages += chain.from_iterable(turn.context or () for turn in turns)
    messages += ({"content": r.parts} for turn in turns for r in turn.action.results if r.parts)
    yield from (placed.image for segment in trajectory.segments for placed in segment.images)
    yield from (p["image"] for p in image_parts(messages) if isinstance(p.get("image"), Image))


def sync_blobs(folders: Iterable[Path], synced: Set[Path]) -> set[Path]:
    """Sync the files of folders to disk except those in `synced`; return the files that were synced."""
    new: set[Path] = set()
    for folder in folders:
        files = set(folder.glob("[!.]*")) - synced
        for file in files:
            sync(file)
        if files:
            sync(folder)
        new |= files
    return new


def _write_once(path: Path, content: bytes) -> None:
    """Write a file unless it has these contents. A power loss may have left it with others, since it is synced with the next checkpoint."""
    if not path.exists() or path.read_bytes() != content:
        with new_file(path, synced=False) as temporary:
            temporary.write_bytes(content)
