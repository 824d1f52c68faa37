"""Random access to recorded episodes: the index entries of all records, and any record by its episode's id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.file_lock import is_locked
from agentrl.errors import StoreError, suggest
from agentrl.store.blobs import Outputs
from agentrl.store.episode_files import (
    blobs_folder,
    data_files,
    episodes_folder,
    frames,
    images_folder,
    index_of,
    number_of,
    outputs_folder,
)
from agentrl.store.episode_index import IndexEntry, index_entry, read_entries
from agentrl.store.episode_record import decode
from agentrl.store.zstd import decompress


@dataclass(slots=True)
class _Progress:
    """How far a data file and its index have been read, in bytes."""

    data: int = 0
    index: int = 0
    truncated: bool = False
    """the last record is incomplete"""


class Recording:
    """The records in a run folder, a folder of episodes or one file. `refresh` reads what was written since."""

    def __init__(self, path: Path | str) -> None:
        """Read the index of all records at `path`.

        Raises:
            StoreError: there are no episodes, a file is damaged, or a newer agentrl wrote it.
        """
        self.path = path = Path(path)
        self.folder = episodes_folder(path)
        self.blobs = blobs_folder(path)
        """folder of the files that episodes refer to"""
        self.images = images_folder(path)
        """folder of the images among them"""
        self.outputs = Outputs(outputs_folder(path))
        self.episodes: list[IndexEntry] = []
        self.steps: list[IndexEntry] = []
        self.being_written = False
        """True if a writer, in any process, had the last file open at the last refresh"""
        self.advantages: dict[str, float] = {}
        """advantages of the episodes that were trained on, by episode id"""
        self._progress: dict[Path, _Progress] = {}
        self._by_id: dict[str, IndexEntry] = {}
        self._steps_by_id: dict[str, IndexEntry] = {}
        self.refresh()

    @property
    def truncated(self) -> int:
        """The number of incomplete records: a crash truncated them, or they are being written."""
        return sum(p.truncated for p in self._progress.values())

    @property
    def note(self) -> str:
        """A remark for readers if the records are being written or some are incomplete; else an empty string."""
        if self.being_written:
            return f"{self.path} is being written: {len(self.episodes)} episodes so far"
        return (
            f"{self.truncated} half-written episode{'s' if self.truncated > 1 else ''} skipped"
            if self.truncated
            else ""
        )

    def refresh(self) -> int:
        """Read what was written since the last call; return the number of new records."""
        before = len(self.episodes) + len(self.steps)
        files = data_files(self.folder)
        self.being_written = any(map(is_locked, files[-1:]))
        for file in files:
            if file not in self._progress:
                self._check_version(file)
                self._progress[file] = _Progress()
            self._read_new(file, self._progress[file])
        return len(self.episodes) + len(self.steps) - before

    def entry(self, episode_id: str) -> IndexEntry:
        """Return the entry of an episode; the last one if several have that id.

        Raises:
            StoreError: there is no such episode.
        """
        if episode_id not in self._by_id:
            raise StoreError(f"{self.path}: no episode {episode_id!r}{suggest(episode_id, list(self._by_id)[:2000])}")
        return self._by_id[episode_id]

    def record(self, entry: IndexEntry) -> dict[str, Any]:
        """Read the record of an entry.

        Raises:
            StoreError: the record is damaged, or the index says something else of it.
        """
        file = next(f for f in self._progress if number_of(f) == entry.file)
        with file.open("rb") as f:
            f.seek(entry.offset)
            frame = f.read(entry.length)
        line = decompress(frame, f"{file}: the record at byte {entry.offset}")
        record = decode(line, f"{file}, byte {entry.offset}")
        if index_entry(record, entry.offset, entry.length, entry.file) != entry:
            raise StoreError(
                f"{index_of(file)} differs from the record at byte {entry.offset} of {file.name}; remove the index"
            )
        return record

    def records(self, entries: list[IndexEntry] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records of entries (default: all episodes)."""
        return map(self.record, self.episodes if entries is None else entries)

    def step_of(self, episode_id: str) -> dict[str, Any] | None:
        """Return the record of the optimizer step that trained on an episode; None if no step did."""
        entry = self._steps_by_id.get(episode_id)
        return None if entry is None else self.record(entry)

    def _check_version(self, file: Path) -> None:
        first = next(frames(file), None)
        if first is not None and first.line is not None:
            decode(first.line, f"{file}, byte 0")

    def _read_new(self, file: Path, progress: _Progress) -> None:
        size = file.stat().st_size
        if size <= progress.data:
            return
        number, index = number_of(file), index_of(file)
        if index.exists():
            with index.open("rb") as f:
                f.seek(progress.index)
                raw = f.read()
            whole = raw[: raw.rfind(b"\n") + 1]
            entries, progress.data = read_entries(whole, progress.data, size, number)
            if len(entries) == whole.count(b"\n"):
                progress.index += len(whole)
            self._add(entries)
        progress.truncated = False
        for frame in frames(file, progress.data) if progress.data < size else ():
            if frame.line is None:
                progress.truncated = True
                break
            record = decode(frame.line, f"{file}, byte {frame.offset}")
            progress.data = frame.offset + frame.length
            self._add([index_entry(record, frame.offset, frame.length, number)])

    def _add(self, entries: list[IndexEntry]) -> None:
        for entry in entries:
            if entry.kind == "step":
                self.steps.append(entry)
                self.advantages.update(entry.advantages or {})
                self._steps_by_id.update(dict.fromkeys(entry.advantages or (), entry))
            else:
                self.episodes.append(entry)
                self._by_id[entry.id] = entry
