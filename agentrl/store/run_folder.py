"""The run folder: what a run leaves behind, and what it needs to go on to the bit after a crash.

    config.toml      the resolved settings and the code's version
    metrics.jsonl    one line per rollout and per evaluation; no timings, so equal runs have equal files
    timings.jsonl    seconds, per rollout
    tensorboard/     the same numbers as events
    episodes/        every episode (store.py)
    checkpoints/     NNNNNN/: trainer/ (weights, optimizer, random state) and state.json; only a training run has it, and can be resumed
    hf/              the last weights in Hugging Face layout
    curve.png, summary.json

Whatever was written after the checkpoint that a resumed run starts from is cut off first: those rollouts are made again, equal.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from agentrl.config import Config, RunSettings
from agentrl.core.name_syntax import split_object
from agentrl.errors import ConfigError, StoreError
from agentrl.store import EpisodeWriter, truncate
from agentrl.store.lock import hold


class JsonLines:
    """A JSONL file that is flushed line by line and can be cut back to a position."""

    def __init__(self, path: Path) -> None:
        """Open it, or create it.

        Raises:
            StoreError: another process, which is alive, has it open.
        """
        self.path = path
        self._file = path.open("ab")
        if not hold(self._file):
            self._file.close()
            raise StoreError(f"{path} is being written by a run that is still going on; stop that one first")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
        self._file.flush()

    def position(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def cut(self, size: int) -> None:
        """Drop what comes after `size` bytes."""
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        return [orjson.loads(line) for line in self.path.read_bytes().splitlines()]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunFolder:
    """An open run folder."""

    def __init__(self, path: Path, config: Config, state: Mapping[str, Any]) -> None:
        """`state`: of the checkpoint that it goes on from; empty: none."""
        self.path = path
        self.config = config
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.timings = JsonLines(path / "timings.jsonl")
        self.metrics.cut(state.get("metrics_bytes", 0))
        self.timings.cut(state.get("timings_bytes", 0))
        truncate(path / "episodes", *state.get("episodes_position", (0, 0)))
        self.episodes = EpisodeWriter(path / "episodes")

    @classmethod
    def create(cls, config: Config, version: str) -> RunFolder:
        """A new folder.

        Raises:
            ConfigError: it exists already (nothing is overwritten), or cannot be made.
        """
        path = Path(config.run.run) if config.run.run else next_free(Path("runs"), config.env.env)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            resume = f", or go on with it: agentrl train --resume {path}" if _goes_on(path) else ""
            raise ConfigError(f"the run folder {path} exists already; choose another with --run{resume}") from None
        except OSError as e:
            raise ConfigError(f"the run folder {path} cannot be made: {e.strerror}; choose another with --run") from e
        _write_config(path, config, version)
        return cls(path, config, {})

    @classmethod
    def reopen(cls, path: Path, config: Config, version: str, state: Mapping[str, Any]) -> RunFolder:
        """Go on with a run from the state of its last checkpoint. Everything after that checkpoint is cut off.

        `config.toml` tells from here on what the run goes on with: the settings as they are now, and this version of the code.

        Raises:
            StoreError: it is still going on.
        """
        folder = cls(path, config, state)
        _write_config(path, config, version)
        return folder

    def save(self, step: int, state: Mapping[str, Any], save_trainer: Any) -> Path:
        """Write a checkpoint under a temporary name, then rename it: a crash leaves the old one or the new one, never half of one."""
        final = self.path / "checkpoints" / f"{step:06d}"
        temporary = final.with_name(f".{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_trainer(temporary / "trainer")
        positions = {
            "metrics_bytes": self.metrics.position(),
            "timings_bytes": self.timings.position(),
            "episodes_position": self.episodes.position(),
        }
        (temporary / "state.json").write_bytes(orjson.dumps({**state, **positions}, option=orjson.OPT_INDENT_2))
        temporary.rename(final)
        keep = self.config.run.keep_checkpoints
        if keep:
            for old in checkpoints(self.path)[:-keep]:
                shutil.rmtree(old)
        return final

    def export(self, write: Callable[[Path], Any]) -> None:
        """Have `write` make a new folder of weights and put it in the place of `hf/`, where an earlier end of this run may have left one."""
        final, new, old = (self.path / name for name in ("hf", ".hf-new", ".hf-old"))
        shutil.rmtree(new, ignore_errors=True)
        write(new)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Close all files."""
        self.metrics.close()
        self.timings.close()
        self.episodes.close()


def _write_config(path: Path, config: Config, version: str) -> None:
    new = path / ".config.toml"
    new.write_text(f"# agentrl {version}\n{config.to_toml()}", encoding="utf-8")
    new.replace(path / "config.toml")


def settings_fingerprint(config: Config) -> str:
    """Equal for equal settings (files by their whole paths), whatever the run is called, however long it goes on and in how many processes.
    Kept with every episode.
    """
    text = replace(
        config,
        run=RunSettings(seed=config.run.seed),
        rollout=replace(config.rollout, num_rollout=1, runner_processes=1),
    ).to_toml()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checkpoints(path: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(
        p for p in (path / "checkpoints").glob("*") if re.fullmatch(r"\d{6}", p.name) and (p / "state.json").exists()
    )


def last_checkpoint(path: Path, config: Config) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that a run goes on from, if it has one yet, and its state.

    Raises:
        StoreError: it is no training run.
        ConfigError: it cannot go on, or not to where the settings say.
    """
    last, state = _last(path)
    if last is None:
        return None, {}
    if state.get("recorded"):
        raise ConfigError(
            f"{path} was made by --train-only and has no rollouts of its own to go on with; begin a new run"
        )
    if config.rollout.num_rollout < state["step"]:
        raise ConfigError(
            f"{path} has done {state['step']} rollouts; --num-rollout {config.rollout.num_rollout} is fewer; give at least as many"
        )
    return last, state


def _last(path: Path) -> tuple[Path | None, dict[str, Any]]:
    """A training run's last checkpoint and its state, if it has one yet."""
    found = checkpoints(require_run(path))
    return (found[-1], orjson.loads((found[-1] / "state.json").read_bytes())) if found else (None, {})


def _goes_on(path: Path) -> bool:
    """A training run with rollouts of its own."""
    try:
        return not _last(path)[1].get("recorded")
    except (StoreError, ValueError):  # none, or a damaged one
        return False


def next_free(parent: Path, name: str) -> Path:
    """`parent/NAME-NNN`, the first number not taken."""
    where, attribute = split_object(name)
    words = f"{Path(where).stem}-{attribute}" if where.endswith(".py") else name
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")
    number = 1
    while (parent / f"{stem}-{number:03d}").exists():
        number += 1
    return parent / f"{stem}-{number:03d}"


def require_run(path: Path) -> Path:
    """A folder that is a training run.

    Raises:
        StoreError: it is none.
    """
    if not (path / "config.toml").exists():
        raise StoreError(f"{path} is no run folder (it has no config.toml)")
    if not (path / "checkpoints").exists():
        raise StoreError(
            f"{path} is no run that can be resumed (it has no checkpoints/, as those of `agentrl train` have); begin a new one"
        )
    return path
