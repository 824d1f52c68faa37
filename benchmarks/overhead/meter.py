"""CPU time, wall time and memory of this process, and its CPU time at each round of turns."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path


def cpu_s() -> float:
    """CPU seconds of this process, its threads and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def memory_kb(what: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(f"{what}:"))
    return int(line.split()[1])


class Meter:
    """Measures what happens between `start` and `stop`."""

    def __init__(self) -> None:
        self.episodes = 0
        self._calls = 0
        self._marks: list[float] = []

    def start(self, episodes: int) -> None:
        """Begin; `episodes` make a round."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self.episodes, self._calls = episodes, 0
        self.memory_kb = memory_kb("VmRSS")
        self.started = time.perf_counter()
        self.cpu = cpu_s()
        self._marks = [self.cpu]

    def hit(self) -> None:
        """A tool was called. When every episode has called it k times, round k is over."""
        self._calls += 1
        if self.episodes and self._calls % self.episodes == 0:
            self._marks.append(cpu_s())

    def stop(self, turns: int) -> dict[str, float | list[float]]:
        """What it took."""
        wall, cpu = time.perf_counter() - self.started, cpu_s() - self.cpu
        rounds = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return {
            "cpu_ms_per_turn": cpu / (self.episodes * turns) * 1e3,
            "wall_s": wall,
            "episodes_per_s": self.episodes / wall,
            "peak_mb": memory_kb("VmHWM") / 1024,
            "grown_mb": (memory_kb("VmHWM") - self.memory_kb) / 1024,
            "rounds_ms": [r / self.episodes * 1e3 for r in rounds],
        }


METER = Meter()
