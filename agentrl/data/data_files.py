"""Tasks from JSONL and Parquet files, with slices (`path@[a:b]`). Errors name the file and the line."""

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
    """Return the tasks of `path` or `path@[a:b]` (rows a to b - 1; blank lines do not count).

    `check` may refuse a task by raising a UsageError; file and line are added to its message.

    Raises:
        DataError: the file is missing, a row is malformed or lacks a column, or a task is refused.
    """
    name, part = split_slice(spec)
    path, bounds = Path(name), [int(n) if n else None for n in part[2:-1].split(":")] if part else [None, None]
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
        raise DataError(f"{spec} holds no tasks; the file or the slice is empty")
    return tasks


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    return _parquet_rows(_existing(path)) if path.suffix == ".parquet" else json_rows(path)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"no data file {path}")
    return path


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError(f"{path}: reading Parquet needs pyarrow; run pip install agentrl[parquet]") from e
    try:
        yield from enumerate(pq.read_table(path).to_pylist(), 1)
    except (ValueError, OSError) as e:  # pyarrow's errors are both
        raise DataError(f"{path}: not a Parquet file: {e}") from e


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line numbers and the objects of a JSONL file. Blank lines are skipped.

    Raises:
        DataError: the file is missing, or a line is not a JSON object.
    """
    with _existing(path).open("rb") as f:
        for line, raw in enumerate(f, 1):
            if not raw.strip():
                continue
            try:
                row = orjson.loads(raw)
            except orjson.JSONDecodeError as e:
                raise DataError(f"{path}, line {line}: not JSON: {e}") from e
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {line}: expected a JSON object, found {type(row).__name__}")
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
            raise DataError(
                f"{path}, line {line}: {input_key!r} must be a string or a list of messages, "
                f"found {type(row[input_key]).__name__}: {row[input_key]!r:.60}"
            )
    metadata = {k: v for k, v in row.items() if k not in (input_key, label_key, "id")}
    if isinstance(metadata.get("metadata"), dict):
        metadata |= metadata.pop("metadata")
    return Task(str(row.get("id", line - 1)), prompt, row[label_key], metadata)
