"""What a power loss may leave of a folder: a record of the changes and syncs of a run, and the states of the disk that follow from it.

A `Recorder` notes every change of a folder's entries and of its files' contents, and every fsync, in order. Contents that other processes
write are noted at the next event; their fsyncs are not noted, so what they alone synced counts as not synced.

`disk_after` writes a state that a power loss after any number of these events may leave, by the rules that POSIX gives and no file system
is weaker than:

- What was in a file at its last fsync is there. What was written since may be there, be there in part, be zeros, or be missing.
- What was in a folder at its last fsync is there. Entries that were made, removed or renamed since may be changed or not, one by one, also
  when the contents are not there. A rename is done or not done.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = 0
"""number of the folder itself"""
_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
"""what changes a folder or a file; Python reports each before it happens"""
_RECENT_NS = 50_000_000
"""Within this time of a change a file may change again without a new time of modification."""


class Entry(NamedTuple):
    """One event of the log."""

    kind: str
    """content, add, remove, rename, sync, or begin"""
    node: int
    """the file of a content, the folder of an entry, or what is synced"""
    value: Any = None
    """content: bytes; add: (name, node, whether it is a folder); remove: name; rename: (old, new)"""


@dataclass
class _Node:
    """A file or folder as it was seen last."""

    folder: bool
    content: bytes = b""
    entries: dict[str, int] = field(default_factory=dict)
    key: tuple[int, ...] = ()


class Recorder:
    """Notes what happens to a folder while `recording`."""

    def __init__(self, root: Path, *, sync: bool = False) -> None:
        """`sync`: pass fsyncs on to the system; they take most of the time."""
        self.root, self._sync = root, sync
        self.log: list[Entry] = []
        """first what was there before, up to the entry `begin`"""
        self._nodes = {ROOT: _Node(folder=True)}
        self._numbers: dict[int, int] = {}
        """of inodes"""
        self._held: list[int] = []
        """descriptors: an inode that is open is not given to another file"""
        self._lock, self._busy = threading.RLock(), threading.local()
        self._active = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A block whose changes are noted."""
        fsync = os.fsync
        self._numbers[self.root.stat().st_ino] = ROOT

        def noted(descriptor: int) -> None:
            if not isinstance(descriptor, int):
                descriptor = descriptor.fileno()
            with self._lock:
                self.look()
                if self._sync:
                    fsync(descriptor)
                number = self._numbers.get(os.fstat(descriptor).st_ino)
                if number is not None:
                    self.log.append(Entry("sync", number))

        sys.addaudithook(self._before)
        os.fsync, self._active = noted, True
        try:
            self.look()
            self.log += [Entry("sync", number) for number in self._nodes]  # what is there is on the disk
            self.log.append(Entry("begin", ROOT))
            yield
            self.look()
        finally:
            os.fsync, self._active = fsync, False
            for descriptor in self._held:
                os.close(descriptor)

    def _before(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active or getattr(self._busy, "looking", False):
            return
        if event in _EVENTS or (event == "open" and _writes(*args[1:])):
            self.look()

    def look(self) -> None:
        """Note what has changed since the last look."""
        self._busy.looking = True
        try:
            with self._lock:
                self._look(self.root, ROOT)
        finally:
            self._busy.looking = False

    def _look(self, path: Path, number: int) -> None:
        node, entries, inside = self._nodes[number], {}, []
        with os.scandir(path) as found:
            for item in found:
                try:
                    facts = item.stat(follow_symlinks=False)
                    entries[item.name] = self._number(item.path, facts)
                except FileNotFoundError:  # removed by another process
                    continue
                inside.append((Path(item.path), entries[item.name], facts))
        new = {n for n in entries.values() if n not in node.entries.values()}
        for child_path, child, facts in inside:
            if not self._nodes[child].folder:
                self._read(child_path, child, facts)
        for entry in _changes(number, node.entries, entries, self._nodes):
            self.log.append(entry)
        node.entries = entries
        for child_path, child, _ in inside:
            if self._nodes[child].folder and (child in new or child_path.exists()):
                self._look(child_path, child)

    def _number(self, path: str, facts: os.stat_result) -> int:
        if facts.st_ino not in self._numbers:
            self._held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
            self._numbers[facts.st_ino] = number = len(self._nodes)
            self._nodes[number] = _Node(folder=stat.S_ISDIR(facts.st_mode))
        return self._numbers[facts.st_ino]

    def _read(self, path: Path, number: int, facts: os.stat_result) -> None:
        node = self._nodes[number]
        key = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if key == node.key and time.time_ns() - facts.st_mtime_ns > _RECENT_NS:
            return
        node.key = key
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        if content != node.content:
            node.content = content
            self.log.append(Entry("content", number, content))


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _changes(number: int, before: dict[str, int], after: dict[str, int], nodes: dict[int, _Node]) -> Iterator[Entry]:
    """The events that lead from a folder's entries to others. What has another name now was renamed."""
    gone = {node: name for name, node in before.items() if after.get(name) != node}
    come = {name: node for name, node in after.items() if before.get(name) != node}
    for name, node in come.items():
        if node in gone:
            yield Entry("rename", number, (gone.pop(node), name))
        else:
            yield Entry("add", number, (name, node, nodes[node].folder))
    for name in gone.values():
        if name not in after:
            yield Entry("remove", number, name)


# -- states ------------------------------------------------------------------------------------------------------------


@dataclass
class _Disk:
    """A file or folder on the disk: what is synced, and what happened since."""

    folder: bool
    synced: Any
    since: list[Any] = field(default_factory=list)


def disk_after(log: Sequence[Entry], random: Random, target: Path, events: int | None = None) -> int:
    """Write into the new folder `target` what a power loss at a moment of a log may leave; returns the number of events before it.

    Args:
        log: of a recorder.
        random: chooses the moment and what is left.
        target: a new folder.
        events: the moment, as the number of events before it; None: any.
    """
    if events is None:
        events = random.randint(log.index(Entry("begin", ROOT)), len(log))
    disk = {ROOT: _Disk(folder=True, synced={})}
    for entry in log[:events]:
        if entry.kind == "add" and entry.value[1] not in disk:
            disk[entry.value[1]] = _Disk(folder=entry.value[2], synced={} if entry.value[2] else b"")
        if entry.kind == "sync":
            node = disk.get(entry.node)
            if node is not None:
                node.synced = _applied(node.synced, node.since) if node.folder else (node.since or [node.synced])[-1]
                node.since = []
        elif entry.kind == "content":
            disk.setdefault(entry.node, _Disk(folder=False, synced=b"")).since.append(entry.value)
        elif entry.kind != "begin":
            disk[entry.node].since.append(entry)
    keep = random.choice([0.0, 1.0, random.random(), None])
    _write(disk, ROOT, keep, random, target)
    return events


def _applied(entries: dict[str, int], changes: Sequence[Entry]) -> dict[str, int]:
    after = dict(entries)
    for kind, _, value in changes:
        if kind == "add":
            after[value[0]] = value[1]
        elif kind == "remove":
            after.pop(value, None)
        elif value[0] in after:
            after[value[1]] = after.pop(value[0])
    return after


def _write(disk: dict[int, _Disk], number: int, keep: float | None, random: Random, target: Path) -> None:
    """Write a folder. `keep`: the share of the changes of folders that are on the disk; None: in each folder, all or none."""
    target.mkdir()
    node, share = disk[number], random.choice([0.0, 1.0]) if keep is None else keep
    for name, child in _applied(node.synced, [c for c in node.since if random.random() < share]).items():
        if disk[child].folder:
            _write(disk, child, keep, random, target / name)
        else:
            (target / name).write_bytes(_content(disk[child], random))


def _equal(one: bytes, other: bytes) -> int:
    """Return how many bytes two contents have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _content(file: _Disk, random: Random) -> bytes:
    """What may be in a file; the bytes at its beginning that were synced and not written since stay."""
    if not file.since:
        return file.synced
    last = file.since[-1]
    safe = len(file.synced)
    for version in file.since:
        safe = _equal(file.synced[:safe], version)
    cut = random.randint(safe, max(safe, len(last)))
    return random.choice(
        [
            last,
            file.synced,
            random.choice(file.since),
            last[:safe],
            last[:cut],
            last[:cut] + bytes(len(last) - cut),
            last[:safe] + bytes(len(last) - safe),
        ]
    )
