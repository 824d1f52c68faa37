"""benchmarks/results/overhead_cpu.json with one section per benchmark, each with its date and versions, and the page made from it."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from benchmarks.overhead.assets import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("aiohttp", "orjson", "tokenizers", "zstandard", "pydantic")


def keep(section: str, command: str, found: dict[str, Any], text: str) -> None:
    """Put a section's figures and its text into both files."""
    file = RESULTS / "overhead_cpu.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[section] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": command,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load": os.getloadavg()[0],
        "versions": {p: version(p) for p in PACKAGES},
        "text": text,
        "found": found,
    }
    file.write_text(json.dumps(kept, indent=1) + "\n")
    parts = ["# Overhead per turn"]
    for name, s in kept.items():
        said = ", ".join(f"{k} {v}" for k, v in s["versions"].items())
        parts.append(
            f"## {name}\n\n{s['date']}, `{s['command']}`, {s['machine']}, load {s['load']:.1f}, Python {s['python']}, {said}."
        )
        parts.append(s["text"])
    (RESULTS / "overhead_cpu.md").write_text("\n\n".join(parts) + "\n")
