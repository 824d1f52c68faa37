"""The record of a result, as the files in benchmarks/results/ hold it."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any


def result_record(metric: str, value: float, baseline: Any, command: str, **details: Any) -> dict[str, Any]:
    """A result with the commit that is checked out and today's date."""
    return {
        "metric": metric,
        "value": value,
        "baseline": baseline,
        **details,
        "commit": commit(),
        "command": command,
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str | None:
    """The short hash of the commit that is checked out; None outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or None
