"""Files of records: written whole and flushed, rotated, read in order.

A folder of files `000000.jsonl.zst`, `000001.jsonl.zst`, …; one record is one zstd frame that holds one line of JSON, so any zstd reads them
(`zstd -dc`). A frame that a crash cut short is skipped, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from agentrl.errors import StoreError
from agentrl.store.blobs import ImageFolder, Outputs, images_of
from agentrl.store.episode_index import read_entries, summary, write_entry
from agentrl.store.episode_record import decode, encode, from_record, is_episode, step_record, to_record
from agentrl.store.lock import hold
from agentrl.types import Trajectory

ROTATE_BYTES = 256 << 20
"""a data file that is larger is followed by a new one"""
_CHUNK = 1 << 18


class EpisodeWriter:
    """Appends records to a folder, and their entries to the index. One writer at a time."""

    def __init__(self, folder: Path, level: int = 1) -> None:
        """`level`: of compression; 3 takes half as much again and saves 2 % (most of a record is digits)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._images = ImageFolder(images_folder(folder))
        self.outputs = Outputs(outputs_folder(folder))
        """tools' outputs that were cut, whole; written only if that is wanted"""
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
        files = data_files(folder)
        # a file of its own after what is there: a crash may have cut the last frame short, and nothing after that could be read
        self._number = number_of(files[-1]) + bool(files[-1].stat().st_size) if files else 0
        self._open()

    def write(self, trajectory: Trajectory, **extra: Any) -> None:
        """Append one episode, whole, and flush. `extra` (step, split, config fingerprint, …) is kept beside it; images go into files first."""
        self._images.write(images_of(trajectory))
        self.append(to_record(trajectory, **extra))

    def write_step(self, **values: Any) -> None:
        """Append what the trainer was fed in one optimizer step."""
        self.append(step_record(**values))

    def append(self, record: dict[str, Any]) -> None:
        """Append a record as it is."""
        frame = self._compressor.compress(encode(record))
        self._file.write(frame)
        self._file.flush()
        self._index.write(write_entry(summary(record, self._at, len(frame))))
        self._index.flush()
        self._at += len(frame)
        if self._at > ROTATE_BYTES:
            self.close()
            self._number += 1
            self._open()

    def position(self) -> tuple[int, int]:
        """(file number, bytes): what `truncate` goes back to."""
        return self._number, self._at

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._index.close()

    def _open(self) -> None:
        path = self.folder / f"{self._number:06d}.jsonl.zst"
        self._file: BinaryIO = path.open("ab")
        hold(self._file)
        self._at = self._file.tell()
        self._index: BinaryIO = index_of(path).open("ab" if self._at else "wb")


class Frame(NamedTuple):
    """Where a record lies in its file."""

    at: int
    length: int
    line: bytes | None
    """None: the end of the file cuts it short"""


def frames(file: Path, start: int = 0) -> Iterator[Frame]:
    """Frames from byte `start` on, in chunks, so that a large file costs no memory. A last one with `line` None was cut short.

    Raises:
        StoreError: the file is damaged.
    """
    with file.open("rb") as f:
        f.seek(start)
        rest, at, read = b"", start, start
        while True:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts: list[bytes] = []
            while not frame.eof:
                chunk = rest or f.read(_CHUNK)
                read += 0 if rest else len(chunk)
                if not chunk:
                    if read > at:
                        yield Frame(at, read - at, None)
                    return
                rest = b""
                try:
                    parts.append(frame.decompress(chunk))
                except zstandard.ZstdError as e:
                    raise StoreError(f"{file}: damaged in the record at byte {at}: {e}") from e
            rest = frame.unused_data
            end = read - len(rest)
            yield Frame(at, end - at, b"".join(parts))
            at = end


def all_records(path: Path, cut: Callable[[Path], None] | None = None) -> Iterator[dict[str, Any]]:
    """Records of both kinds, of a file or folder, in order of writing; `cut` hears of every file whose last record a crash cut short.

    Raises:
        StoreError: no such file, one that is damaged, or a record of a newer version.
    """
    path = episodes_folder(path)
    for file in data_files(path) if path.is_dir() else [path]:
        for frame in frames(file):
            if frame.line is not None:
                yield decode(frame.line, file)
            elif cut is not None:
                cut(file)


def read_records(path: Path, cut: Callable[[Path], None] | None = None) -> Iterator[dict[str, Any]]:
    """Records of episodes; see `all_records`."""
    return (r for r in all_records(path, cut) if is_episode(r))


def read_episodes(path: Path) -> Iterator[Trajectory]:
    """Trajectories of a file, a folder or a run."""
    images = images_folder(path)
    return (from_record(r, images) for r in read_records(path))


def truncate(folder: Path, number: int, size: int) -> None:
    """Go back to a position: later files and bytes are removed (resuming from a checkpoint)."""
    for file in data_files(folder):
        at, index = number_of(file), index_of(file)
        if at > number:
            file.unlink()
            index.unlink(missing_ok=True)
        elif at == number and file.stat().st_size > size:
            os.truncate(file, size)
            if index.exists():
                kept, _ = read_entries(index.read_bytes(), 0, size, at)
                index.write_bytes(b"".join(map(write_entry, kept)))


def episodes_folder(path: Path) -> Path:
    """Where the episodes of a run folder lie; a folder of episodes and a single file stand for themselves.

    Raises:
        StoreError: nothing is there.
    """
    if not path.exists():
        raise StoreError(f"no episodes at {path}")
    if path.is_dir() and not data_files(path):
        if not (path / "episodes").is_dir():
            raise StoreError(f"{path}: holds no episodes (no *.jsonl.zst, no episodes/)")
        return path / "episodes"
    return path


def images_folder(path: Path) -> Path:
    """Where the images of episodes lie."""
    return _beside(path) / "images"


def outputs_folder(path: Path) -> Path:
    """Where whole outputs of tools lie."""
    return _beside(path) / "outputs"


def _beside(path: Path) -> Path:
    """The folder that files of episodes lie in."""
    if path.is_dir() and not data_files(path) and (path / "episodes").is_dir():
        path = path / "episodes"
    return path.parent if path.is_file() else path


def data_files(folder: Path) -> list[Path]:
    """Data files of a folder, in order."""
    return sorted(f for f in folder.glob("*.jsonl.zst") if f.name.split(".")[0].isdecimal())


def index_of(file: Path) -> Path:
    """The index beside a data file."""
    return file.with_name(file.name.removesuffix(".jsonl.zst") + ".index")


def number_of(file: Path) -> int:
    """The number in a data file's name; 0 if it was renamed."""
    name = file.name.split(".")[0]
    return int(name) if name.isdecimal() else 0
