"""What the server knows of a run: its record, its numbers, and what replay and rescore left. Everything is read; nothing is written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from agentrl.store import IndexEntry, Recording
from agentrl.view.episode_detail import Decode, episode_detail
from agentrl.view.episode_list import COLUMNS, FILTERS, select, whole_number

_REFRESH_S = 0.5
MOST_ROWS = 500
"""rows of the list in one answer"""
MOST_POINTS = 2000
"""lines of metrics in one answer; of more, every n-th"""


class RunSource:
    """A run being looked at, and perhaps being written."""

    def __init__(self, path: Path, decode: Decode | None = None, note: str = "") -> None:
        """`note`: why tokens cannot be decoded, if they cannot."""
        self.path = path
        self.decode = decode
        self.note = note
        self.recording = Recording(path)
        self._checked = time.monotonic()
        self._order: tuple[Any, list[IndexEntry]] = (None, [])
        self._replay: tuple[float, dict[str, str]] = (0.0, {})
        self._run = path if path.is_dir() and (path / "config.toml").exists() else None

    def refresh(self) -> None:
        """Take in what was written, at most twice a second."""
        if time.monotonic() - self._checked > _REFRESH_S:
            self.recording.refresh()
            self._checked = time.monotonic()

    # -- the run -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """Numbers that change when there is something new."""
        self.refresh()
        metrics = self._run / "metrics.jsonl" if self._run else None
        size = metrics.stat().st_size if metrics is not None and metrics.exists() else 0
        return {"episodes": len(self.recording.episodes), "steps": len(self.recording.steps), "metrics": size}

    def overview(self) -> dict[str, Any]:
        """Everything on the first page."""
        episodes = self.recording.episodes
        table = Counter((e.split, e.stop, e.status, e.cause or "") for e in episodes)
        components = dict.fromkeys(k for e in (*episodes[:200], *episodes[-200:]) for k in e.rewards)
        return {
            "name": self.path.resolve().name,
            "state": self.state(),
            "cut": self.recording.truncated,
            "note": self.note,
            "splits": sorted({e.split for e in episodes}),
            "stops": sorted({e.stop for e in episodes}),
            "components": list(components),
            "table": [
                {"split": k[0], "stop": k[1], "status": k[2], "cause": k[3], "count": n}
                for k, n in table.most_common(200)
            ],
            "metrics": self._lines("metrics.jsonl"),
            "timings": self._lines("timings.jsonl"),
            "config": self._text("config.toml"),
            "replay": dict(Counter(self.replayed().values())),
            "rescore": self._json("rescore.json"),
        }

    def replayed(self) -> dict[str, str]:
        """By episode, what the last replay said: 'identical', or the cause."""
        file = self._run / "replay.jsonl" if self._run else None
        if file is None or not file.exists():
            return {}
        changed = file.stat().st_mtime
        if changed != self._replay[0]:
            rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
            self._replay = (
                changed,
                {r["episode_id"]: (r["divergence"] or {"cause": "identical"})["cause"] for r in rows},
            )
        return self._replay[1]

    def divergence(self, episode_id: str) -> Any:
        """What the last replay found in an episode: its divergence, None (identical), or 'unknown'."""
        if episode_id not in self.replayed() or self._run is None:
            return "unknown"
        for line in (self._run / "replay.jsonl").read_bytes().splitlines():
            row = orjson.loads(line)
            if row["episode_id"] == episode_id:
                return row["divergence"]
        return "unknown"

    # -- episodes ----------------------------------------------------------------------------------------------------

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the list; see listing.py for `query`, of which offset and limit are read here.

        Raises:
            StoreError: a number that is none, an unknown column.
        """
        self.refresh()
        found = self._selected(query)
        offset, limit = whole_number(query, "offset", 0), min(whole_number(query, "limit", 100), MOST_ROWS)
        replayed, advantages = self.replayed(), self.recording.advantages
        rows = []
        for e in found[offset : offset + limit]:
            own = {c: getattr(e, c) for c in COLUMNS}
            rows.append(own | {"advantage": advantages.get(e.id), "replay": replayed.get(e.id)})
        return {"total": len(found), "offset": offset, "rows": rows}

    def neighbours(self, episode_id: str, query: Mapping[str, str]) -> tuple[str | None, str | None]:
        """The episodes before and after one in the list as it is filtered and sorted."""
        ids = [e.id for e in self._selected(query)]
        if episode_id not in ids:
            return None, None
        at = ids.index(episode_id)
        return (ids[at - 1] if at else None), (ids[at + 1] if at + 1 < len(ids) else None)

    def _selected(self, query: Mapping[str, str]) -> list[IndexEntry]:
        """Filtered and sorted; kept until the question or the record changes."""
        asked = tuple(query.get(n, "") for n in (*FILTERS, "sort", "desc"))
        key = (len(self.recording.episodes), len(self.recording.steps), self._replay[0], asked)
        if self._order[0] != key:
            found = select(self.recording.episodes, query, self.replayed(), self.recording.advantages)
            self._order = (key, found)
        return self._order[1]

    def episode(self, episode_id: str) -> dict[str, Any]:
        """One episode, whole.

        Raises:
            StoreError: there is none of that id.
        """
        self.refresh()
        entry = self.recording.entry(episode_id)
        made = episode_detail(
            self.recording.record(entry),
            self.recording.step_of(episode_id),
            self.decode,
            self.recording.advantages.get(episode_id),
            self.recording.images,
            self.recording.outputs,
        )
        group = [
            e.id
            for e in self.recording.episodes
            if (e.split, e.step, e.group) == (entry.split, entry.step, entry.group)
        ]
        return made | {"group": group, "replay": self.divergence(episode_id), "note": self.note}

    # -- files -------------------------------------------------------------------------------------------------------

    def _lines(self, name: str) -> list[Any]:
        raw = self._bytes(name)
        lines = [orjson.loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
        return lines[:: max(1, len(lines) // MOST_POINTS)]

    def _text(self, name: str) -> str:
        return self._bytes(name).decode(errors="replace")

    def _json(self, name: str) -> Any:
        raw = self._bytes(name)
        return orjson.loads(raw) if raw else None

    def _bytes(self, name: str) -> bytes:
        file = self._run / name if self._run else None
        return file.read_bytes() if file is not None and file.exists() else b""
