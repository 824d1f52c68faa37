"""Checkpoints of a run: written so that a power loss leaves the previous one, and verified before a run resumes from one.

    checkpoints/NNNNNN/   after NNNNNN rollouts
        trainer/          weights, optimizer, random state
        buffer.jsonl      groups in flight and groups that wait to be trained on, if the schedule has a window
        state.json        counters; sizes and checksums of everything else, and of itself

`state.json` holds the sizes and checksums of the files in `trainer/`, the checksums of the metrics and timings up to the checkpoint, and the
sizes of the episode files. These files are synced to disk before it. A checkpoint of an older agentrl lacks checksums: its sizes are checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agentrl.config import Config
from agentrl.core.atomic_write import new_folder, sync_tree
from agentrl.core.file_lock import is_locked
from agentrl.errors import ConfigError, StoreError
from agentrl.store.episode_files import data_files, number_of

_LINES = ("metrics", "timings")
"""JSON Lines files that a resumed run truncates to the checkpoint"""
_CHUNK = 1 << 20


SaveTrainer = Callable[[Path], Callable[[], None] | None]
"""Writes the trainer's part of a checkpoint; returns None, or a function that completes it."""


class ResumePoint(NamedTuple):
    """Where a run resumes."""

    checkpoint: Path | None
    """None: from the beginning"""
    state: dict[str, Any]
    """the checkpoint's state; empty without one"""
    damaged: tuple[str, ...] = ()
    """what is wrong with each later checkpoint, which is therefore not used"""


def begin_checkpoint(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    positions: Mapping[str, Any],
    save_trainer: SaveTrainer,
    files: Mapping[str, bytes],
) -> Callable[[], Path]:
    """Start a checkpoint of the run as it is now; the function that is returned completes it.

    Args:
        run: the run folder. Its files may grow before the checkpoint is complete.
        step: number of rollouts so far.
        state: the counters.
        positions: those of the run's files, which must be synced to disk.
        save_trainer: writes the trainer's part into a new folder; see `SaveTrainer`.
        files: further files, by name.
    """
    checkpoint = run / "checkpoints" / f"{step:06d}"
    with ExitStack() as guard:
        temporary = guard.enter_context(new_folder(checkpoint))
        finish_trainer = save_trainer(temporary / "trainer")
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        sizes = {"episodes_sizes": [file.stat().st_size for file in data_files(run / "episodes")]}
        writing = guard.pop_all()

    def finish() -> Path:
        with writing:
            if finish_trainer is not None:
                finish_trainer()
            sync_tree(temporary)
            lines = {
                f"{name}_checksum": _checksum(run / f"{name}.jsonl", positions[f"{name}_bytes"]) for name in _LINES
            }
            whole = {**state, **positions, **lines, **sizes, "files": _files(temporary)}
            whole["checksum"] = _state_checksum(whole)
            (temporary / "state.json").write_bytes(orjson.dumps(whole, option=orjson.OPT_INDENT_2))
        return checkpoint

    return finish


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first; a damaged one counts."""
    return sorted(p for p in (run / "checkpoints").glob("*") if re.fullmatch(r"\d{6}", p.name))


def last_checkpoint(path: Path, config: Config) -> ResumePoint:
    """Return the checkpoint to resume a run from: the last one that is not damaged.

    Raises:
        StoreError: the folder does not hold a training run, the run is still active, or all its checkpoints are damaged.
        ConfigError: the run cannot be resumed, or not with these settings.
    """
    found = checkpoints(require_run(path))
    metrics = path / "metrics.jsonl"
    if metrics.exists() and is_locked(metrics):
        raise StoreError(f"{metrics} is being written by a run that is still active; stop that run first")
    damaged: list[str] = []
    for checkpoint in reversed(found):
        try:
            state = verified_state(path, checkpoint)
        except StoreError as e:
            damaged.append(str(e))
            continue
        _require_resumable(path, state, config)
        return ResumePoint(checkpoint, state, tuple(damaged))
    if damaged:
        raise StoreError(
            f"{path} cannot be resumed, because no checkpoint is intact: {'; '.join(damaged)}; "
            "restore the files from a backup, or start a new run"
        )
    return ResumePoint(None, {})


def set_aside_after(run: Path, checkpoint: Path | None) -> None:
    """Rename the checkpoints after `checkpoint` to NNNNNN.damaged, so that the resumed run can write theirs; remove incomplete ones."""
    for incomplete in (run / "checkpoints").glob(".*"):
        shutil.rmtree(incomplete)
    for later in checkpoints(run):
        if checkpoint is None or later.name > checkpoint.name:
            aside = later.with_name(f"{later.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)


def remove_old(run: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints; 0 keeps all."""
    for old in checkpoints(run)[:-keep] if keep else ():
        shutil.rmtree(old)


def can_resume(path: Path) -> bool:
    """Whether a folder holds a training run with an intact checkpoint, or none yet."""
    try:
        found = checkpoints(require_run(path))
        return not found or not read_state(found[-1]).get("recorded")
    except StoreError:  # not a training run, or a damaged one
        return False


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


def _require_resumable(path: Path, state: Mapping[str, Any], config: Config) -> None:
    if state.get("recorded"):
        raise ConfigError(f"{path} was made by --train-only and has no rollouts to resume; start a new run")
    if config.rollout.num_rollout < state["step"]:
        raise ConfigError(
            f"{path} has completed {state['step']} rollouts, more than --num-rollout {config.rollout.num_rollout}; "
            f"set --num-rollout to at least {state['step']}"
        )


# -- verification ------------------------------------------------------------------------------------------------------


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's state.json.

    Raises:
        StoreError: it is missing, not JSON, or not what was written.
    """
    file = checkpoint / "state.json"
    try:
        state = orjson.loads(file.read_bytes())
    except OSError as e:
        raise StoreError(f"{file} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise StoreError(f"{file} is not JSON: {e}") from e
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise StoreError(f"{file} is not the state of a checkpoint: it has no key 'step'")
    if "checksum" in state and state["checksum"] != _state_checksum(state):
        raise StoreError(f"{file} was changed after it was written: its checksum differs")
    if "checksum" not in state and "files" in state:
        raise StoreError(f"{file} was changed after it was written: its checksum is missing")
    return state


def verified_state(run: Path, checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's state if the checkpoint and the files of the run that it refers to are intact.

    Raises:
        StoreError: they are not; the message names the file.
    """
    state = read_state(checkpoint)
    if int(checkpoint.name) != state["step"]:
        raise StoreError(f"{checkpoint} holds the state after rollout {state['step']}: it was renamed or swapped")
    _verify_files(checkpoint, state)
    for name in _LINES:
        file, size = run / f"{name}.jsonl", state.get(f"{name}_bytes", 0)
        if _size(file) < size:
            raise StoreError(
                f"{file} has {max(_size(file), 0)} bytes, but {checkpoint.name} was saved when it had {size}"
            )
        expected = state.get(f"{name}_checksum")
        if expected is not None and _checksum(file, size) != expected:
            raise StoreError(f"{file} was changed in its first {size} bytes, which {checkpoint.name} was saved with")
    _verify_episodes(run / "episodes", checkpoint, state)
    return state


def _verify_files(checkpoint: Path, state: Mapping[str, Any]) -> None:
    trainer = checkpoint / "trainer"
    if "files" not in state:
        if not trainer.is_dir() or not any(trainer.iterdir()):
            raise StoreError(f"{trainer} is missing or empty")
        return
    expected, actual = state["files"], _files(checkpoint)
    if expected == actual:
        return
    missing = sorted(expected.keys() - actual.keys())
    changed = sorted(name for name in expected.keys() & actual.keys() if expected[name] != actual[name])
    added = sorted(actual.keys() - expected.keys())
    for names, what in ((missing, "is missing"), (changed, "was changed after it was written: its checksum differs")):
        if names:
            raise StoreError(f"{checkpoint / names[0]} {what}")
    raise StoreError(f"{checkpoint / added[0]} does not belong to the checkpoint")


def _verify_episodes(folder: Path, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Every episode file up to the checkpoint's position must be there; only the last one may have grown since."""
    number, size = state.get("episodes_position", (0, 0))
    files = {number_of(file): file for file in data_files(folder)}
    sizes = state.get("episodes_sizes") or [1] * number + [size]
    for n, expected in enumerate(sizes):
        actual = _size(files[n]) if n in files else -1
        if actual < expected and (expected or n < number):
            found = f"has {actual} bytes" if n in files else "is missing"
            raise StoreError(
                f"{folder / f'{n:06d}.jsonl.zst'} {found}, but {checkpoint.name} was saved when it had {expected}"
            )


def _size(file: Path) -> int:
    """Return the size of a file in bytes; -1 if it does not exist."""
    return file.stat().st_size if file.is_file() else -1


def _files(folder: Path) -> dict[str, str]:
    """Return size and checksum of every file in a checkpoint except its state."""
    names = sorted(
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, files in os.walk(folder) for name in files
    )
    names = [name for name in names if name != "state.json"]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: _checksum(folder / name), names), strict=True))


def _checksum(file: Path, size: int | None = None) -> str:
    """Return 'BYTES:HASH' of a file, or of its first `size` bytes."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    with file.open("rb") as f:
        while chunk := f.read(_CHUNK if size is None else min(_CHUNK, size - total)):
            digest.update(chunk)
            total += len(chunk)
    return f"{total}:{digest.hexdigest()}"


def _state_checksum(state: Mapping[str, Any]) -> str:
    """Return the checksum of a state without its own; the same before it is written and after it is read."""
    values = {name: value for name, value in state.items() if name != "checksum"}
    plain = orjson.loads(orjson.dumps(values))
    return hashlib.blake2b(orjson.dumps(plain), digest_size=16).hexdigest()
