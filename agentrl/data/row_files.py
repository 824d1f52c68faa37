"""Rows of data files: JSONL, JSON, CSV, TSV and Parquet, compressed by gzip or not; folders, patterns and shards of them; hub data sets.

Errors name the file and the line.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import orjson

from agentrl.errors import DataError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""of data files; all but Parquet may be followed by .gz"""
_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")
"""orjson reads integers beyond 64 bits as floats"""
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)")
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.\[\]%:-]+))?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file."""

    where: str
    """file and line, item or row, for errors"""
    index: str
    """the row's number from 0, after the file's name where there are several files"""
    values: Mapping[str, Any]
    arrow: bool = False
    """read from Parquet or Arrow: missing keys of objects are null"""


def read_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a file, a folder, a pattern (`data/train-*.parquet`), or a hub data set (`owner/name` or `owner/name:split`).

    Raises:
        DataError: there is no such data, or a row is malformed.
    """
    files = data_files(name)
    if not files:
        yield from _hub_rows(name)
    for path in files:
        for number, place, values in _file_rows(path):
            index = str(number - 1) if len(files) == 1 else f"{path.name}/{number - 1}"
            yield Row(f"{path}, {place}", index, values, arrow=data_suffix(path) == ".parquet")


def data_files(name: str) -> list[Path]:
    """The files of a name, sorted; [] if it can only be a hub data set.

    Raises:
        DataError: there is no such file, a folder holds no data file, or it holds several splits.
    """
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(
            p for p in path.rglob("*") if p.is_file() and data_suffix(p) in SUFFIXES and not _is_hidden(p, path)
        )
        splits = {match.group() for p in files if (match := _SPLIT.match(p.name))}
        if not files:
            raise DataError(f"no data file in the folder {path}; data files end with {', '.join(SUFFIXES)}")
        if len(splits) > 1:
            raise DataError(
                f"the folder {path} holds several splits ({', '.join(sorted(splits))}); name one by a pattern: {path}/train-*"
            )
        return files
    if _HUB_ID.fullmatch(name) and data_suffix(path) not in SUFFIXES:
        return []
    if glob.has_magic(name):
        files = sorted(p for p in map(Path, glob.glob(name, recursive=True)) if p.is_file())
        if not files:
            raise DataError(f"no data file matches {name}")
        return files
    raise DataError(f"no data file {path}")


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def data_suffix(path: Path) -> str:
    """The suffix that says how a file is read: that before .gz, if it is compressed."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


_Rows = Iterator[tuple[int, str, Mapping[str, Any]]]
"""(number from 1, place in the file, values)"""


def _file_rows(path: Path) -> _Rows:
    kind = data_suffix(path)
    if kind == ".parquet":
        return _parquet_rows(path)
    if kind in (".csv", ".tsv"):
        return _csv_rows(path, "\t" if kind == ".tsv" else ",")
    return _json_array_rows(path) if kind == ".json" else _json_lines(path)


def _json_lines(path: Path) -> _Rows:
    return ((line, f"line {line}", row) for line, row in json_rows(path))


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parquet_rows(path: Path) -> _Rows:
    try:
        import pyarrow.parquet as pq
    except ImportError as e:
        raise DataError(f"{path}: reading Parquet needs pyarrow; run pip install agentrl[parquet]") from e
    try:
        rows = pq.read_table(path).to_pylist()
    except (ValueError, OSError) as e:  # pyarrow's errors are both
        raise DataError(f"{path}: not a Parquet file: {e}") from e
    for number, values in enumerate(rows, 1):
        yield number, f"row {number}", values


def _hub_rows(name: str) -> Iterator[Row]:
    match = _HUB_ID.fullmatch(name)
    assert match is not None, "data_files checks it"
    owner_name, split = match.group(1), match.group(2) or "train"
    try:
        import datasets
    except ImportError as e:
        raise DataError(
            f"no data file {name}; if it is a data set of the hub, reading it needs the package datasets: run pip install datasets"
        ) from e
    try:
        table = datasets.load_dataset(owner_name, split=split)
    except (ValueError, OSError) as e:  # not found, no such split, no network
        raise DataError(
            f"no data file {name}, and no data set of the hub could be read: {str(e).splitlines()[0]}"
        ) from e
    for line, values in enumerate(table):
        yield Row(f"{owner_name} ({split}), row {line}", str(line), values, arrow=True)


def _csv_rows(path: Path, delimiter: str) -> _Rows:
    try:
        with _open(path) as f:
            text = f.read().removeprefix(_BOM).decode()
    except (UnicodeDecodeError, OSError, EOFError) as e:
        raise DataError(f"{path}: not a text in UTF-8: {e}") from e
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for number, values in enumerate(reader, 1):
            place = f"line {reader.line_num}"
            if None in values or None in values.values():
                raise DataError(f"{path}, {place}: expected {len(reader.fieldnames or ())} columns as in line 1")
            yield number, place, values
    except csv.Error as e:
        raise DataError(f"{path}, line {reader.line_num}: not CSV: {e}") from e


def _json_array_rows(path: Path) -> _Rows:
    """The objects of a JSON list; a file with an object in each line is read as JSONL."""
    try:
        with _open(path) as f:
            text = f.read().removeprefix(_BOM)
    except (OSError, EOFError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from e
    if not text.lstrip().startswith(b"["):
        yield from _json_lines(path)
        return
    try:
        items = parse_json(text)
    except ValueError as e:
        raise DataError(f"{path}: not JSON: {e}") from e
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise DataError(f"{path}, item {number}: expected a JSON object, found {type(item).__name__}")
        yield number, f"item {number}", item


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line numbers and the objects of a JSONL file. Blank lines are skipped.

    Raises:
        DataError: the file is missing, or a line is not a JSON object.
    """
    if not path.is_file():
        raise DataError(f"no data file {path}")
    try:
        with _open(path) as f:
            for line, raw in enumerate(f, 1):
                text = raw.removeprefix(_BOM) if line == 1 else raw
                if not text.strip():
                    continue
                try:
                    row = parse_json(text)
                except ValueError as e:
                    raise DataError(f"{path}, line {line}: not JSON: {e}") from e
                if not isinstance(row, dict):
                    raise DataError(f"{path}, line {line}: expected a JSON object, found {type(row).__name__}")
                yield line, row
    except (gzip.BadGzipFile, EOFError) as e:
        raise DataError(f"{path}: not a gzip file: {e}") from e


def parse_json(text: bytes) -> Any:
    """Parse JSON; integers of any size are exact.

    Raises:
        ValueError: it is not JSON in UTF-8.
    """
    if not _LONG_NUMBER.search(text):
        return orjson.loads(text)
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
