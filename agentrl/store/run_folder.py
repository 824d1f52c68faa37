"""The run folder: everything that a run writes, and everything that it needs to resume bit-exactly after a crash.

    config.toml      the resolved settings and the version of agentrl
    metrics.jsonl    one line per rollout and per evaluation; no timings, so that equal runs have equal files
    timings.jsonl    seconds, per rollout
    run.log          messages and warnings with time and level; a resumed run appends to it
    tensorboard/     the same numbers as events
    episodes/        every episode (see episode_files.py)
    checkpoints/     NNNNNN/ with trainer/ (weights, optimizer, random state) and state.json; only a run of `agentrl train` has it
    hf/              the final weights as a Hugging Face folder
    curve.png, summary.json

A run that resumes from a checkpoint first removes everything written after it. It repeats those rollouts, with equal results.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from agentrl.config import Config, RunSettings
from agentrl.core.atomic_write import new_file, new_folder
from agentrl.core.name_syntax import split_object
from agentrl.errors import ConfigError, StoreError
from agentrl.store.episode_files import EpisodeWriter, truncate
from agentrl.store.json_lines import JsonLines


class RunFolder:
    """An open run folder."""

    def __init__(self, path: Path, config: Config, state: Mapping[str, Any]) -> None:
        """Open a folder, truncated to a checkpoint. `state` is the checkpoint's state; empty for a run that has none."""
        self.path = path
        self.config = config
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.timings = JsonLines(path / "timings.jsonl")
        self.metrics.truncate(state.get("metrics_bytes", 0))
        self.timings.truncate(state.get("timings_bytes", 0))
        truncate(path / "episodes", *state.get("episodes_position", (0, 0)))
        self.episodes = EpisodeWriter(path / "episodes")

    @classmethod
    def create(cls, config: Config, version: str) -> RunFolder:
        """Create a folder. `version` is that of agentrl.

        Raises:
            ConfigError: the folder exists (nothing is overwritten), or cannot be created.
        """
        path = Path(config.run.run) if config.run.run else next_free(Path("runs"), config.label)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            resume = f", or resume the run: agentrl train --resume {path}" if _can_resume(path) else ""
            raise ConfigError(f"the run folder {path} already exists; choose another with --run{resume}") from None
        except OSError as e:
            raise ConfigError(
                f"the run folder {path} cannot be created: {e.strerror}; choose another with --run"
            ) from e
        _write_config(path, config, version)
        return cls(path, config, {})

    @classmethod
    def reopen(cls, path: Path, config: Config, version: str, state: Mapping[str, Any]) -> RunFolder:
        """Resume a run from the state of its last checkpoint. Everything written after the checkpoint is removed.

        `config.toml` is rewritten: it holds the settings and the version of agentrl that the run continues with.

        Raises:
            StoreError: the run is still active.
        """
        folder = cls(path, config, state)
        for incomplete in (path / "checkpoints").glob(".*"):
            shutil.rmtree(incomplete)
        _write_config(path, config, version)
        return folder

    def save(self, step: int, state: Mapping[str, Any], save_trainer: Callable[[Path], Any]) -> Path:
        """Write a checkpoint. It appears complete or not at all, so a crash leaves the previous one."""
        checkpoint = self.path / "checkpoints" / f"{step:06d}"
        with new_folder(checkpoint) as temporary:
            save_trainer(temporary / "trainer")
            positions = {
                "metrics_bytes": self.metrics.position(),
                "timings_bytes": self.timings.position(),
                "episodes_position": self.episodes.position(),
            }
            (temporary / "state.json").write_bytes(orjson.dumps({**state, **positions}, option=orjson.OPT_INDENT_2))
        keep = self.config.run.keep_checkpoints
        if keep:
            for old in checkpoints(self.path)[:-keep]:
                shutil.rmtree(old)
        return checkpoint

    def export(self, write: Callable[[Path], Any]) -> None:
        """Call `write` with a new folder of weights, then put it in the place of `hf/`, which this run may have written before."""
        final, new, old = (self.path / name for name in ("hf", ".hf-new", ".hf-old"))
        shutil.rmtree(new, ignore_errors=True)
        write(new)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self.metrics.close()
        self.timings.close()
        self.episodes.close()


def _write_config(path: Path, config: Config, version: str) -> None:
    with new_file(path / "config.toml") as file:
        file.write_text(f"# agentrl {version}\n{config.to_toml()}", encoding="utf-8")


def settings_fingerprint(config: Config) -> str:
    """Return a hash of the settings that affect results, with absolute file paths. It is stored with every episode.

    The run's name, its length and the number of processes do not change it.
    """
    text = replace(
        config,
        run=RunSettings(seed=config.run.seed),
        rollout=replace(config.rollout, num_rollout=1, runner_processes=1),
    ).to_toml()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoints(path: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(
        p for p in (path / "checkpoints").glob("*") if re.fullmatch(r"\d{6}", p.name) and (p / "state.json").exists()
    )


def last_checkpoint(path: Path, config: Config) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint to resume a run from and its state; (None, {}) if the run has not written one.

    Raises:
        StoreError: the folder does not hold a training run.
        ConfigError: the run cannot be resumed, or not with these settings.
    """
    last, state = _last(path)
    if last is None:
        return None, {}
    if state.get("recorded"):
        raise ConfigError(f"{path} was made by --train-only and has no rollouts to resume; start a new run")
    if config.rollout.num_rollout < state["step"]:
        raise ConfigError(
            f"{path} has completed {state['step']} rollouts, more than --num-rollout {config.rollout.num_rollout}; "
            f"set --num-rollout to at least {state['step']}"
        )
    return last, state


def _last(path: Path) -> tuple[Path | None, dict[str, Any]]:
    complete = checkpoints(require_run(path))
    return (complete[-1], orjson.loads((complete[-1] / "state.json").read_bytes())) if complete else (None, {})


def _can_resume(path: Path) -> bool:
    try:
        return not _last(path)[1].get("recorded")
    except (StoreError, ValueError):  # not a training run, or a damaged one
        return False


def next_free(parent: Path, name: str) -> Path:
    """Return `parent/NAME-NNN` with the first unused number."""
    where, attribute = split_object(name)
    words = f"{Path(where).stem}-{attribute}" if where.endswith(".py") else name
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")
    number = 1
    while (parent / f"{stem}-{number:03d}").exists():
        number += 1
    return parent / f"{stem}-{number:03d}"


def recorded_config(recorded: Path) -> Path | None:
    """Return the config.toml of the run that a run folder, a folder of episodes or a file of them belongs to; None: there is none."""
    folders = (recorded, recorded.parent, recorded.parent.parent)
    return next((folder / "config.toml" for folder in folders if (folder / "config.toml").exists()), None)


def require_run(path: Path) -> Path:
    """Return a folder if it holds a training run.

    Raises:
        StoreError: it does not.
    """
    if not (path / "config.toml").exists():
        raise StoreError(f"{path} is not a run folder: it has no config.toml")
    if not (path / "checkpoints").exists():
        raise StoreError(
            f"{path} is a run that cannot be resumed: it has no checkpoints/, which only `agentrl train` writes; start a new run"
        )
    return path
