"""Files and folders that appear complete or not at all: they are written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.core.child_process import process_exists
from agentrl.errors import StoreError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`. It is synced to disk and renamed to `path` at the end, or removed if the block raises.

    The order survives a power loss: parent folders, contents, folders, rename, parent folder.

    Raises:
        StoreError: `path` already exists.
    """
    if path.exists():
        raise StoreError(f"{path} already exists; choose a new folder")
    remove_incomplete(path)
    _make_synced(path.parent)
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
        sync_tree(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    folder.rename(path)
    sync(path.parent)


def is_temporary(name: str) -> bool:
    """Whether a file or folder has a name under which `new_file` or `new_folder` writes."""
    return re.fullmatch(r"\..+\.\d+\.(\d+|tmp)", name) is not None


def remove_incomplete(path: Path) -> None:
    """Remove what processes that were killed while they wrote the folder `path` left beside it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.tmp")
    for other in path.parent.iterdir() if path.parent.is_dir() else ():
        match = pattern.fullmatch(other.name)
        if match and not process_exists(int(match[1])):
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def new_file(path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Yield a path beside `path` to write to. It is renamed to `path` at the end, or removed if the block raises.

    A file at `path` is replaced. Any number of processes and threads may write the same file at the same time.

    Args:
        path: the file.
        synced: sync it to disk before the rename, and the rename too. Otherwise a power loss may leave a file with other contents.
    """
    _make_synced(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.unlink(missing_ok=True)  # of an earlier process with the same id
    try:
        yield temporary
        if synced:
            sync(temporary)
        temporary.replace(path)
        if synced:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _make_synced(folder: Path) -> None:
    """Create a folder and its parents as far as they are missing, and sync what was created to disk."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for created in reversed(missing):
        sync(created.parent)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything in a folder to disk: files first, then the folders, innermost first."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
