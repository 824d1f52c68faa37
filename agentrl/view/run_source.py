"""What the server reads of a run: its record, its metrics, and the results of replay and rescore. It writes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.redaction import redact
from agentrl.errors import StoreError
from agentrl.store import IndexEntry, Recording
from agentrl.store.json_lines import read_json_lines
from agentrl.view.episode_detail import Decode, episode_detail
from agentrl.view.episode_list import COLUMNS, FILTERS, select, whole_number

_REFRESH_S = 0.5
MAX_ROWS = 500
"""Rows of the list in one response."""
MAX_LABEL = 200
"""Characters of a label in the list."""
MAX_POINTS = 2000
"""Lines of metrics in one response; a longer file is sampled at equal distances."""


def require_there(path: Path) -> None:
    """Refuse to show what is no longer there as if nothing had been written since.

    Raises:
        StoreError: the path does not exist.
    """
    if not path.exists():
        raise StoreError(f"{path} is gone; was it deleted? Restore it, or stop this command")


class RunSource:
    """A run that the page shows, complete or still being written."""

    def __init__(self, path: Path, decode: Decode | None = None, note: str = "") -> None:
        """Open a run. `note` is shown on the page; it says why tokens cannot be decoded."""
        self.path = path
        self.decode = decode
        self.note = note
        self.recording = Recording(path)
        self._refreshed = time.monotonic()
        self._selection: tuple[Any, list[IndexEntry]] = (None, [])
        """the last query with the state that it was answered from, and its result"""
        self._labels: dict[tuple[int, int], str] = {}
        self._replay_mtime = 0.0
        self._divergences: dict[str, Any] = {}
        self._replayed: dict[str, str] = {}
        self._folder = path if path.is_dir() and (path / "config.toml").exists() else None

    def refresh(self) -> None:
        """Read what was written since, at most twice a second.

        Raises:
            StoreError: the run was deleted.
        """
        require_there(self.path)
        if time.monotonic() - self._refreshed > _REFRESH_S:
            self.recording.refresh()
            self._refreshed = time.monotonic()

    # -- the run -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """Return numbers that change when there is something new."""
        self.refresh()
        metrics = self._file("metrics.jsonl")
        return {
            "episodes": len(self.recording.episodes),
            "steps": len(self.recording.steps),
            "metrics": metrics.stat().st_size if metrics else 0,
        }

    def overview(self) -> dict[str, Any]:
        """Return everything on the first page."""
        episodes = self.recording.episodes
        ends = Counter((e.split, e.stop, e.status, e.cause or "") for e in episodes)
        components = dict.fromkeys(name for e in (*episodes[:200], *episodes[-200:]) for name in e.rewards)
        config, rescore = self._file("config.toml"), self._file("rescore.json")
        return {
            "name": self.path.resolve().name,
            "state": self.state(),
            "truncated": self.recording.truncated,
            "note": self.note,
            "splits": sorted({e.split for e in episodes}),
            "stops": sorted({e.stop for e in episodes}),
            "components": list(components),
            "table": [
                dict(zip(("split", "stop", "status", "cause"), end, strict=True), count=count)
                for end, count in ends.most_common(200)
            ],
            "metrics": self._points("metrics.jsonl"),
            "timings": self._points("timings.jsonl"),
            "config": redact(config.read_text(errors="replace")) if config else "",
            "replay": dict(Counter(self.replayed().values())),
            "rescore": orjson.loads(rescore.read_bytes()) if rescore else None,
        }

    def replayed(self) -> dict[str, str]:
        """Return the result of the last replay by episode id: 'identical', or the cause of the difference."""
        file = self._file("replay.jsonl")
        if file is None:
            return {}
        mtime = file.stat().st_mtime
        if mtime != self._replay_mtime:
            self._divergences = {row["episode_id"]: row["divergence"] for row in read_json_lines(file)}
            self._replayed = {i: d["cause"] if d else "identical" for i, d in self._divergences.items()}
            self._replay_mtime = mtime
        return self._replayed

    # -- episodes ----------------------------------------------------------------------------------------------------

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the list. `query` holds offset and limit besides the keys that episode_list.py describes.

        Raises:
            StoreError: the query holds an invalid number or an unknown column.
        """
        self.refresh()
        selected = self._selected(query)
        offset, limit = whole_number(query, "offset", 0), min(whole_number(query, "limit", 100), MAX_ROWS)
        replayed, advantages = self.replayed(), self.recording.advantages
        rows = [
            {
                **{column: getattr(e, column) for column in COLUMNS},
                "label": self._label(e),
                "advantage": advantages.get(e.id),
                "replay": replayed.get(e.id),
            }
            for e in selected[offset : offset + limit]
        ]
        return {"total": len(selected), "offset": offset, "rows": rows}

    def _label(self, entry: IndexEntry) -> str:
        """The beginning of the task's label, which the index does not hold; '': there is none, or the record is damaged, as its own page says."""
        place = entry.file, entry.offset
        if place not in self._labels:
            label = None
            with suppress(StoreError):
                label = self.recording.record(entry)["task"].get("label")
            self._labels[place] = "" if label is None else str(label)[:MAX_LABEL]
        return self._labels[place]

    def neighbours(self, episode_id: str, query: Mapping[str, str]) -> tuple[str | None, str | None]:
        """Return the ids of the episodes before and after one in the list, filtered and sorted."""
        ids = [None, *(e.id for e in self._selected(query)), None]
        if episode_id not in ids:
            return None, None
        at = ids.index(episode_id)
        return ids[at - 1], ids[at + 1]

    def _selected(self, query: Mapping[str, str]) -> list[IndexEntry]:
        """Return the list, filtered and sorted; cached until the query or the record changes."""
        replayed, recording = self.replayed(), self.recording
        asked = tuple(query.get(name, "") for name in (*FILTERS, "sort", "desc"))
        key = (len(recording.episodes), len(recording.steps), self._replay_mtime, asked)
        if self._selection[0] != key:
            self._selection = (key, select(recording.episodes, query, replayed, recording.advantages))
        return self._selection[1]

    def episode(self, episode_id: str) -> dict[str, Any]:
        """Return everything about one episode.

        Raises:
            StoreError: there is no such episode.
        """
        self.refresh()
        recording = self.recording
        entry = recording.entry(episode_id)
        detail = episode_detail(
            recording.record(entry),
            recording.step_of(episode_id),
            self.decode,
            recording.advantages.get(episode_id),
            recording.images,
            recording.outputs,
        )
        group = [
            e.id for e in recording.episodes if (e.split, e.step, e.group) == (entry.split, entry.step, entry.group)
        ]
        replay = self._divergences[episode_id] if episode_id in self.replayed() else "unknown"
        return detail | {"group": group, "replay": replay, "note": self.note}

    # -- files -------------------------------------------------------------------------------------------------------

    def _points(self, name: str) -> list[Any]:
        file = self._file(name)
        lines = read_json_lines(file) if file else []
        return lines[:: max(1, len(lines) // MAX_POINTS)]

    def _file(self, name: str) -> Path | None:
        """Return a file of the run folder; None if it is not there."""
        file = self._folder / name if self._folder else None
        return file if file is not None and file.exists() else None
