"""Files of records: appended to, flushed after each record, rotated, read in order.

A folder holds `000000.jsonl.zst`, `000001.jsonl.zst`, … One record is one zstd frame with one line of JSON, so that any zstd reads them
(`zstd -dc`). A frame that a crash truncated is skipped and counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from agentrl.core.atomic_write import sync
from agentrl.core.file_lock import try_lock
from agentrl.errors import StoreError
from agentrl.store.blobs import EXPERTS, IMAGES, ExpertsFolder, ImageFolder, Outputs, images_of, sync_blobs
from agentrl.store.episode_index import index_entry, read_entries, write_entry
from agentrl.store.episode_record import VERSION, decode, encode, from_record, is_episode, to_record
from agentrl.store.zstd import FrameReader
from agentrl.types import Trajectory

ROTATE_BYTES = 256 << 20
"""Size above which a data file is closed and the next one begun."""
_CHUNK = 1 << 18
"""Bytes read at a time."""


class EpisodeWriter:
    """Appends records to a folder, and their entries to the index. A folder has one writer at a time."""

    def __init__(self, folder: Path, level: int = 1) -> None:
        """Open a folder, or create it. `level` is zstd's: level 3 takes half as long again and saves 2 % (a record is mostly digits)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._images = ImageFolder(images_folder(folder))
        self._experts = ExpertsFolder(experts_folder(folder))
        self.outputs = Outputs(outputs_folder(folder))
        """complete tool outputs, written with --keep-whole-outputs"""
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
        self._blobs_synced: set[Path] = set()
        self._lock = threading.Lock()
        files = data_files(folder)
        # Always a new file: a crash may have truncated the last frame of the previous one, and nothing after it could be read.
        self._number = number_of(files[-1]) + bool(files[-1].stat().st_size) if files else 0
        self._open()

    def write(self, trajectory: Trajectory, **extra: Any) -> None:
        """Append an episode and flush. `extra` (step, split, config fingerprint, …) is stored beside it."""
        self._images.write(images_of(trajectory))  # first, so that no record refers to a missing file
        self._experts.write(trajectory)
        self.append(to_record(trajectory, **extra))

    def write_step(self, **values: Any) -> None:
        """Append the record of an optimizer step (see train/step_record.py)."""
        self.append({"version": VERSION, "kind": "step", **values})

    def append(self, record: dict[str, Any]) -> None:
        line = encode(record)
        with self._lock:  # an evaluation beside training writes too
            self._append(record, line)

    def _append(self, record: dict[str, Any], line: bytes) -> None:
        if not self._path.exists():  # writing to the open file would succeed, and be lost
            raise StoreError(
                f"{self._path} is gone while episodes are recorded in it; was it deleted? Start again with another --run"
            )
        frame = self._compressor.compress(line)
        self._file.write(frame)
        self._file.flush()
        self._index.write(write_entry(index_entry(record, self._offset, len(frame))))
        self._index.flush()
        self._offset += len(frame)
        if self._offset > ROTATE_BYTES:
            self.close()
            self._number += 1
            self._open()

    def position(self) -> tuple[int, int]:
        """Return the file number and its size in bytes; `truncate` restores them."""
        return self._number, self._offset

    def sync(self) -> None:
        """Sync the records, and the images, routed experts and tool outputs that they refer to, to disk."""
        folders = (self._images.folder, self._experts.folder, self.outputs.folder)
        self._blobs_synced |= sync_blobs(folders, self._blobs_synced)
        os.fsync(self._file.fileno())
        sync(self.folder)

    def close(self) -> None:
        """Sync the last file to disk and close it."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._index.close()

    def _open(self) -> None:
        self._path = path = self.folder / f"{self._number:06d}.jsonl.zst"
        self._file: BinaryIO = path.open("ab")
        try_lock(self._file)
        self._offset = self._file.tell()
        self._index: BinaryIO = index_of(path).open("ab" if self._offset else "wb")


class Frame(NamedTuple):
    """A record in its file."""

    offset: int
    length: int
    line: bytes | None
    """None: the frame is truncated by the end of the file"""


def frames(file: Path, start: int = 0) -> Iterator[Frame]:
    """Yield the frames from byte `start` on. The file is read in chunks, so a large one takes no memory.

    Raises:
        StoreError: the file is damaged.
    """
    with file.open("rb") as f:
        f.seek(start)
        offset = position = start
        rest = memoryview(b"")
        while True:
            frame = FrameReader(f"{file}: the record at byte {offset}")
            while not frame.complete:
                if not rest:
                    rest = memoryview(f.read(_CHUNK))
                    position += len(rest)
                if not rest:
                    if position > offset:
                        yield Frame(offset, position - offset, None)
                    return
                rest = rest[frame.feed(rest) :]
            end = position - len(rest)
            yield Frame(offset, end - offset, frame.content())
            offset = end


def all_records(path: Path, on_truncated: Callable[[Path], None] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of both kinds in a file or folder, in the order of writing.

    `on_truncated` is called with each file whose last record a crash truncated.

    Raises:
        StoreError: there is no such file, it is damaged, or a record has a newer version.
    """
    for file in data_files(episodes_folder(path)):
        for frame in frames(file):
            if frame.line is not None:
                yield decode(frame.line, f"{file}, byte {frame.offset}")
            elif on_truncated is not None:
                on_truncated(file)


def read_records(path: Path, on_truncated: Callable[[Path], None] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of episodes; see `all_records`."""
    return filter(is_episode, all_records(path, on_truncated))


def count_readable(path: Path) -> int:
    """Return the number of episodes before the first record that cannot be read; a power loss may leave such records at the end."""
    count = 0
    try:
        for _ in read_records(path):
            count += 1
    except StoreError:
        pass
    return count


def read_episodes(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories in a file, a folder of episodes or a run folder."""
    blobs = blobs_folder(path)
    return (from_record(r, blobs) for r in read_records(path))


def truncate(folder: Path, number: int, size: int) -> None:
    """Remove the records after a writer's earlier `position`; a run that is resumed from a checkpoint repeats them."""
    for file in data_files(folder):
        index = index_of(file)
        if number_of(file) > number:
            file.unlink()
            index.unlink(missing_ok=True)
        elif number_of(file) == number and file.stat().st_size > size:
            os.truncate(file, size)
            sync(file)  # later checkpoints sync the files that are written after this one, and not it
            if index.exists():
                kept, _ = read_entries(index.read_bytes(), 0, size, number)
                index.write_bytes(b"".join(map(write_entry, kept)))


# -- where files are ---------------------------------------------------------------------------------------------------


def episodes_folder(path: Path) -> Path:
    """Return the folder of episodes in a run folder; a folder of episodes or a single file is returned as it is.

    Raises:
        StoreError: there are no episodes.
    """
    if not path.exists():
        raise StoreError(f"no episodes at {path}: it does not exist")
    if path.is_dir() and not data_files(path):
        if not (path / "episodes").is_dir():
            raise StoreError(f"{path}: holds no episodes (no *.jsonl.zst files and no folder episodes/)")
        return path / "episodes"
    return path


def images_folder(path: Path) -> Path:
    return blobs_folder(path) / IMAGES


def experts_folder(path: Path) -> Path:
    return blobs_folder(path) / EXPERTS


def outputs_folder(path: Path) -> Path:
    return blobs_folder(path) / "outputs"


def blobs_folder(path: Path) -> Path:
    """Return the folder of the data files, which need not exist yet; the files that records refer to are in folders beside them."""
    if path.is_file():
        return path.parent
    return path / "episodes" if not data_files(path) and (path / "episodes").is_dir() else path


def data_files(path: Path) -> list[Path]:
    """Return the data files in a folder, in order; a file is its own only data file."""
    if path.is_file():
        return [path]
    return sorted(f for f in path.glob("*.jsonl.zst") if f.name.split(".")[0].isdecimal())


def index_of(file: Path) -> Path:
    return file.with_name(file.name.removesuffix(".jsonl.zst") + ".index")


def number_of(file: Path) -> int:
    """Return the number in a data file's name; 0 if the file was renamed."""
    name = file.name.split(".")[0]
    return int(name) if name.isdecimal() else 0
