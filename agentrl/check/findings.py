"""The findings of a check, and the report that prints them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum


class Severity(str, Enum):
    """How serious a finding is. Only errors violate the contract."""

    ERROR = "error"
    WARNING = "warning"
    """may be intended, but rarely is"""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation about an environment."""

    severity: Severity
    where: str
    """a method, a tool, or a subject ('tasks', 'rewards', 'determinism')"""
    what: str
    do: str
    """what to do about it"""
    count: int = 1
    """how often it occurred"""


class Findings:
    """Collects findings from any thread, and counts equal ones."""

    def __init__(self) -> None:
        self._counts: Counter[Finding] = Counter()

    def error(self, where: str, what: str, do: str) -> None:
        self._counts[Finding(Severity.ERROR, where, what, do)] += 1

    def warning(self, where: str, what: str, do: str) -> None:
        self._counts[Finding(Severity.WARNING, where, what, do)] += 1

    def note(self, where: str, what: str, do: str) -> None:
        self._counts[Finding(Severity.NOTE, where, what, do)] += 1

    def sorted(self) -> list[Finding]:
        """Return the findings, the most serious first."""
        severities = list(Severity)
        counted = [replace(finding, count=count) for finding, count in self._counts.items()]
        return sorted(counted, key=lambda f: (severities.index(f.severity), f.where, -f.count))


@dataclass
class Report:
    """The result of a check. `str(report)` is a table of the findings."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    episodes: int = 0
    turns: int = 0
    scores: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    """number of episodes by stop reason"""

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return all(f.severity is not Severity.ERROR for f in self.findings)

    def __str__(self) -> str:
        scores = f", scores {min(self.scores):g} to {max(self.scores):g}" if self.scores else ""
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(self.reasons.items())) or "nothing"
        lines = [f"{self.env}: {self.episodes} episodes, {self.turns} turns{scores}; ended by {ends}"]
        width = max((len(f.where) for f in self.findings), default=0)
        for f in self.findings:
            times = f" ({f.count} times)" if f.count > 1 else ""
            lines.append(f"{f.severity.value:<7}  {f.where:<{width}}  {f.what}{times}")
            lines.append(f"{'':<7}  {'':<{width}}  -> {f.do}")
        counts = Counter(f.severity for f in self.findings)
        total = ", ".join(f"{counts[s]} {s.value}{'s' * (counts[s] > 1)}" for s in Severity if counts[s])
        return "\n".join([*lines, f"{'ok' if self.ok else 'not ok'}: {total or 'no findings'}"])
