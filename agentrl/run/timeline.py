"""Who waits for whom: what trainer, weight sync, evaluation and engine did when, as utilisation and as a Chrome trace.

The trace (`timeline.json` of the run folder) opens in chrome://tracing and https://ui.perfetto.dev. Format: "Trace Event Format", Google.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

MAX_EVENTS = 200_000
"""spans that a trace holds; further ones are counted, and still are in the utilisation"""


class Lane:
    """The spans of one resource."""

    def __init__(self) -> None:
        self.active = 0
        """spans that are open"""
        self.busy_s = 0.0
        """time in which at least one span was open"""
        self.total_s = 0.0
        """sum of all spans"""
        self._since = 0.0

    def begin(self, now: float) -> None:
        """A span opens."""
        if not self.active:
            self._since = now
        self.active += 1

    def end(self, start: float, now: float) -> None:
        """A span that opened at `start` closes."""
        self.active -= 1
        self.total_s += now - start
        if not self.active:
            self.busy_s += now - self._since


class Timeline:
    """Spans of a run, from now on. `on_span` receives the lane, the name, and begin and end in seconds since 1970 of each that ended."""

    def __init__(self, on_span: Callable[[str, str, float, float], None] | None = None) -> None:
        self.started = time.perf_counter()
        self._on_span, self._epoch = on_span, time.time() - self.started
        self.lanes: dict[str, Lane] = {}
        self.left_out = 0
        """spans that the trace does not hold"""
        self._events: list[dict[str, Any]] = []
        self._spans = 0

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Note the duration of the `with` block as a span of `lane`; spans of a lane may overlap."""
        start = time.perf_counter()
        state = self.lanes.setdefault(lane, Lane())
        state.begin(start)
        try:
            yield
        finally:
            now = time.perf_counter()
            state.end(start, now)
            self._note(lane, name, start, now)
            if self._on_span is not None:
                self._on_span(lane, name, self._epoch + start, self._epoch + now)

    def _note(self, lane: str, name: str, start: float, end: float) -> None:
        if 2 * self._spans >= MAX_EVENTS:
            self.left_out += 1
            return
        self._spans += 1
        common = {"cat": lane, "name": name, "pid": 1, "tid": lane, "id": self._spans}
        for phase, at in (("b", start), ("e", end)):
            self._events.append({**common, "ph": phase, "ts": round((at - self.started) * 1e6)})

    def write(self, path: Path) -> None:
        """Write the Chrome trace."""
        path.write_bytes(orjson.dumps({"traceEvents": self._events, "spansLeftOut": self.left_out}))

    def summary(self) -> str:
        """The utilisation of each lane, and how many spans were open on average while any was."""
        wall = time.perf_counter() - self.started
        parts = []
        for name, lane in self.lanes.items():
            text = f"{name} {lane.busy_s / wall:.0%}"
            if lane.busy_s and lane.total_s > 1.001 * lane.busy_s:
                text += f" (mean {lane.total_s / lane.busy_s:.1f} at once)"
            parts.append(text)
        return f"of {wall:.0f} s busy: {', '.join(parts)}"


def ceiling(seconds: Mapping[str, float]) -> str:
    """What asynchrony could bring to a synchronous run.

    Work is conserved: no schedule is faster than the trainer's own work, so the gain is at most 1 / (its share of the time).

    Args:
        seconds: totals of `rollout_s`, `train_s` and `sync_s`.

    Example:
        >>> ceiling({"rollout_s": 75.0, "train_s": 20.0, "sync_s": 5.0})
        'the trainer worked 25% of the time; --schedule async can be at most 4.0 x as fast'
    """
    work_s = seconds["train_s"] + seconds["sync_s"]
    total_s = work_s + seconds["rollout_s"]
    if not work_s:
        return "nothing was trained"
    share = work_s / total_s
    return f"the trainer worked {share:.0%} of the time; --schedule async can be at most {1 / share:.1f} x as fast"
