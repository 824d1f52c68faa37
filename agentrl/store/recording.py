"""A store opened for reading at any place: the entries of all its records, one record by its episode's id, what the trainer was fed of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from agentrl.errors import StoreError, suggest
from agentrl.store.blobs import Outputs
from agentrl.store.episode_files import (
    data_files,
    episodes_folder,
    frames,
    images_folder,
    index_of,
    number_of,
    outputs_folder,
)
from agentrl.store.episode_index import Entry, read_entries, summary
from agentrl.store.episode_record import decode
from agentrl.store.lock import is_held


class _Place:
    """How far one data file has been taken in."""

    __slots__ = ("covered", "file", "index_at", "torn")

    def __init__(self, file: Path) -> None:
        self.file = file
        self.covered = 0
        self.index_at = 0
        self.torn = False


class Recording:
    """The records of a run folder, a folder of episodes or one file. `refresh` takes in what was written since."""

    def __init__(self, path: Path) -> None:
        """Open and take in all entries.

        Raises:
            StoreError: nothing there, damaged, or written by a newer version.
        """
        self.path = path
        self.folder = episodes_folder(path)
        self.images = images_folder(path)
        """where the images of episodes lie"""
        self.outputs = Outputs(outputs_folder(path))
        self.episodes: list[Entry] = []
        self.steps: list[Entry] = []
        self.being_written = False
        """had a writer, in any process, the last file open when it was last looked at?"""
        self.advantages: dict[str, float] = {}
        """by episode id, of those that the trainer was fed"""
        self._places: dict[Path, _Place] = {}
        self._by_id: dict[str, Entry] = {}
        self._fed: dict[str, Entry] = {}
        self.refresh()

    @property
    def cut(self) -> int:
        """Records that were cut short: by a crash, or because they are being written just now."""
        return sum(p.torn for p in self._places.values())

    @property
    def note(self) -> str:
        """What a reader should know of these records: they are being written, or some were cut short; else nothing."""
        if self.being_written:
            return f"{self.path} is being written: {len(self.episodes)} episodes so far"
        return f"{self.cut} half-written episode{'s' if self.cut > 1 else ''} skipped" if self.cut else ""

    def refresh(self) -> int:
        """Take in what was written since; the number of new records."""
        before = len(self.episodes) + len(self.steps)
        files = data_files(self.folder) if self.folder.is_dir() else [self.folder]
        self.being_written = any(map(is_held, files[-1:]))
        for file in files:
            place = self._places.get(file)
            if place is None:
                place = self._places[file] = _Place(file)
                self._check_version(file)
            self._extend(place)
        return len(self.episodes) + len(self.steps) - before

    def entry(self, episode_id: str) -> Entry:
        """The entry of an episode; of several of that id the last.

        Raises:
            StoreError: there is none.
        """
        found = self._by_id.get(episode_id)
        if found is None:
            raise StoreError(f"{self.path}: no episode {episode_id!r}{suggest(episode_id, list(self._by_id)[:2000])}")
        return found

    def record(self, entry: Entry) -> dict[str, Any]:
        """The whole record of an entry."""
        file = next(f for f in self._places if number_of(f) == entry.file)
        with file.open("rb") as f:
            f.seek(entry.at)
            raw = f.read(entry.length)
        try:
            line = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
        except zstandard.ZstdError as e:
            raise StoreError(f"{file}: damaged in the record at byte {entry.at}: {e}") from e
        return decode(line, file)

    def records(self, entries: list[Entry] | None = None) -> Iterator[dict[str, Any]]:
        """Records of entries (None: all episodes)."""
        return map(self.record, self.episodes if entries is None else entries)

    def fed(self, episode_id: str) -> dict[str, Any] | None:
        """The step in which the trainer was fed this episode; None: in none."""
        entry = self._fed.get(episode_id)
        return None if entry is None else self.record(entry)

    def _check_version(self, file: Path) -> None:
        first = next(frames(file), None)
        if first is not None and first.line is not None:
            decode(first.line, file)

    def _extend(self, place: _Place) -> None:
        size = place.file.stat().st_size
        if size <= place.covered:
            return
        number, index = number_of(place.file), index_of(place.file)
        entries: list[Entry] = []
        if index.exists():
            with index.open("rb") as f:
                f.seek(place.index_at)
                raw = f.read()
            whole = raw[: raw.rfind(b"\n") + 1]
            entries, place.covered = read_entries(whole, place.covered, size, number)
            if len(entries) == whole.count(b"\n"):
                place.index_at += len(whole)
            self._add(entries)
        place.torn = False
        for frame in frames(place.file, place.covered) if place.covered < size else ():
            if frame.line is None:
                place.torn = True
                break
            entry = summary(decode(frame.line, place.file), frame.at, frame.length)
            entry.file = number
            place.covered = frame.at + frame.length
            self._add([entry])

    def _add(self, entries: list[Entry]) -> None:
        for e in entries:
            if e.kind == "step":
                self.steps.append(e)
                self.advantages.update(e.advantages or {})
                self._fed.update(dict.fromkeys(e.advantages or (), e))
            else:
                self.episodes.append(e)
                self._by_id[e.id] = e
