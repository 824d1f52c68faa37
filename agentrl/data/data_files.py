"""Tasks from files: JSONL and Parquet, with slices (`path@[a:b]`). Errors name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.name_syntax import split_slice
from agentrl.errors import ContractError, DataError, UsageError, suggest
from agentrl.types import Observation, Task


def load_tasks(spec: str, *, input_key: str, label_key: str, check: Callable[[Task], None] | None = None) -> list[Task]:
    """Read all tasks of `path` or `path@[a:b]` (rows a to b - 1, blank lines not counted); `check` may refuse one (its message gets file and line).

    Raises:
        DataError: a missing file, a malformed row (with its line number), a missing column, a refused task.
    """
    name, part = split_slice(spec)
    path, bounds = Path(name), [int(n) if n else None for n in part[2:-1].split(":")] if part else [None, None]
    if not path.is_file():
        raise DataError(f"no data file {path}")
    tasks = []
    for line, row in islice(_rows(path), *bounds):
        task = _task(path, line, row, input_key, label_key)
        if check is not None:
            try:
                check(task)
            except UsageError as e:
                raise DataError(f"{path}, line {line}: {e}") from e
        tasks.append(task)
    if not tasks:
        raise DataError(f"{spec} holds no tasks")
    return tasks


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as pq
        except ImportError as e:
            raise DataError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from e
        try:
            yield from enumerate(pq.read_table(path).to_pylist(), 1)
        except (ValueError, OSError) as e:  # pyarrow's errors are both
            raise DataError(f"{path}: not Parquet: {e}") from e
        return
    with path.open("rb") as f:
        for line, raw in enumerate(f, 1):
            if not raw.strip():
                continue
            try:
                row = orjson.loads(raw)
            except orjson.JSONDecodeError as e:
                raise DataError(f"{path}, line {line}: not JSON: {e}") from e
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {line}: expected an object, found {type(row).__name__}")
            yield line, row


def _task(path: Path, line: int, row: Mapping[str, Any], input_key: str, label_key: str) -> Task:
    for key in (input_key, label_key):
        if key not in row:
            raise DataError(
                f"{path}, line {line}: no column {key!r}{suggest(key, row)}; set --input-key and --label-key"
            )
    prompt = row[input_key]
    if not isinstance(prompt, str):
        try:
            prompt = Observation.of(prompt).messages if isinstance(prompt, list) else ()
        except ContractError:
            prompt = ()
        if not prompt:
            found = f"found {type(row[input_key]).__name__}: {row[input_key]!r:.60}"
            raise DataError(f"{path}, line {line}: {input_key!r} must be a string or a list of messages, {found}")
    rest = {k: v for k, v in row.items() if k not in (input_key, label_key, "id")}
    if isinstance(rest.get("metadata"), dict):
        rest |= rest.pop("metadata")
    return Task(str(row.get("id", line - 1)), prompt, row[label_key], rest)
