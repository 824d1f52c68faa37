"""A folder of runs as the page shows it: a row for each run with its environment, its last metrics and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import read_toml
from agentrl.errors import StoreError, UsageError
from agentrl.store.json_lines import read_json_lines
from agentrl.view.run_source import RunSource, require_there

OpenRun = Callable[[Path], RunSource]
_CONFIG = "config.toml"


def run_folders(folder: Path) -> list[Path]:
    """The run folders in a folder, by name; empty if it is a run itself, or holds none."""
    if not folder.is_dir() or (folder / _CONFIG).exists() or (folder / "episodes").exists():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and (f / _CONFIG).is_file() and (f / "episodes").is_dir())


class RunList:
    """The runs in a folder, read again at each request, so that new runs appear."""

    def __init__(self, path: Path, open_run: OpenRun) -> None:
        self.path = path
        self._open = open_run
        self._opened: dict[str, RunSource] = {}

    def overview(self) -> dict[str, Any]:
        """A row for each run, the one that was written last first.

        Raises:
            StoreError: the folder was deleted.
        """
        require_there(self.path)
        rows = [_row(folder) for folder in run_folders(self.path)]
        return {"name": self.path.resolve().name, "runs": sorted(rows, key=lambda row: -row["changed"])}

    def run(self, name: str) -> RunSource:
        """The run of this name.

        Raises:
            StoreError: there is none.
        """
        folder = next((f for f in run_folders(self.path) if f.name == name), None)
        if folder is None:
            raise StoreError(f"{self.path} holds no run {name[:80]!r}")
        if name not in self._opened:
            self._opened[name] = self._open(folder)
        return self._opened[name]


def _row(folder: Path) -> dict[str, Any]:
    metrics = folder / "metrics.jsonl"
    lines: Sequence[Mapping[str, Any]] = read_json_lines(metrics) if metrics.exists() else []
    rollouts = [line for line in lines if "reward" in line]
    evaluations = [line for line in lines if any(name.startswith("eval/") for name in line)]
    last = rollouts[-1] if rollouts else {}
    try:
        settings: Mapping[str, Any] = read_toml(folder / _CONFIG)
        problem = ""
    except UsageError as e:
        settings, problem = {}, str(e)
    return {
        "name": folder.name,
        "env": str(settings.get("env") or ""),
        "model": str(settings.get("hf_checkpoint") or ""),
        "rollouts": len(rollouts),
        "planned": settings.get("num_rollout"),
        "reward": last.get("reward"),
        "rewards": {name: value for name, value in last.items() if name.startswith("reward/")},
        "first": rollouts[0]["reward"] if rollouts else None,
        "evaluation": {k: v for k, v in evaluations[-1].items() if k.endswith("/reward")} if evaluations else {},
        "turns": last.get("turns"),
        "failures": sum(line.get("failures", 0) for line in rollouts),
        "finished": (folder / "summary.json").exists(),
        "changed": max((f.stat().st_mtime for f in (metrics, folder) if f.exists()), default=0.0),
        "problem": problem,
    }
