"""Tasks from data files, with slices (`path@[a:b]`) and dotted keys (`reward_model.ground_truth`). Errors name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from agentrl.core.name_syntax import split_slice
from agentrl.data.message_form import normal_messages, normal_tools
from agentrl.data.row_files import Row, read_rows
from agentrl.errors import DataError, UsageError, suggest
from agentrl.types import Message, Task

_MISSING = object()


def load_tasks(
    spec: str,
    *,
    input_key: str,
    label_key: str,
    metadata_key: str | None = None,
    tool_key: str = "tools",
    label_required: bool = False,
    numbers: bool = False,
    check: Callable[[Task], None] | None = None,
    places: list[str] | None = None,
) -> list[Task]:
    """Return the tasks of a name or `name@[a:b]` (rows a to b - 1; blank lines do not count).

    Args:
        spec: A file, a folder, a pattern or a hub data set (see `read_rows`), with or without a slice.
        input_key: The column of the prompt; `a.b` is key b of column a.
        label_key: The column of the label. If the first row lacks it, the tasks have no labels.
        metadata_key: The column of the metadata; None: all columns that are not named here.
        tool_key: The column of the task's tools. They become `metadata["tools"]`, in the normal form.
        label_required: The first row must have the label too.
        numbers: A prompt may be a number, such as the index of a task in another package; it is taken as text.
        check: May refuse a task by raising a UsageError; file and line are added to its message.
        places: File and line of each task are appended to it.

    Raises:
        DataError: the file is missing, a row is malformed or lacks a column, or a task is refused.
    """
    name, part = split_slice(spec)
    bounds = [int(n) if n else None for n in part[2:-1].split(":")] if part else [None, None]
    tasks: list[Task] = []
    for row in islice(read_rows(name), *bounds):
        label_required = label_required or (not tasks and value_at(row.values, label_key) is not _MISSING)
        try:
            task = _task(row, (input_key, label_key, metadata_key, tool_key), label_required, numbers)
            if check is not None:
                check(task)
        except UsageError as e:
            raise DataError(f"{row.where}: {e}") from e
        tasks.append(task)
        if places is not None:
            places.append(row.where)
    if not tasks:
        raise DataError(f"{spec} holds no tasks; the file or the slice is empty")
    return tasks


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value of a column, or of a key inside a column (`a.b.c`)."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _task(row: Row, keys: tuple[str, str, str | None, str], label_required: bool, numbers: bool) -> Task:
    values = row.values
    input_key, label_key, _, tool_key = keys
    prompt, label = value_at(values, input_key), value_at(values, label_key)
    for key, value in ((input_key, prompt), (label_key, label if label_required else None)):
        if value is _MISSING:
            raise DataError(
                f"no column {key!r}{suggest(key, values)}; the columns are {', '.join(map(str, values))}; "
                "set --input-key and --label-key"
            )
    metadata = _metadata(values, keys)
    if (tools := value_at(values, tool_key)) is not _MISSING:
        metadata["tools"] = normal_tools(tools, arrow=row.arrow)
    elif tool_key != "tools":
        raise DataError(f"no column {tool_key!r} (--tool-key){suggest(tool_key, values)}")
    if numbers and type(prompt) is int:
        prompt = str(prompt)
    task_id = str(values.get("id", row.index))
    return Task(task_id, _prompt(prompt, input_key, row.arrow), None if label is _MISSING else label, metadata)


def _metadata(values: Mapping[str, Any], keys: tuple[str, str, str | None, str]) -> dict[str, Any]:
    input_key, label_key, metadata_key, tool_key = keys
    if metadata_key is None:
        metadata = {k: v for k, v in values.items() if k not in (input_key, label_key, tool_key, "id")}
        if isinstance(metadata.get("metadata"), dict):
            metadata |= metadata.pop("metadata")
        return metadata
    value = value_at(values, metadata_key)
    if not isinstance(value, Mapping):
        expected = f"--metadata-key {metadata_key!r} must be a column of objects"
        raise DataError(f"{expected}, found {'no such column' if value is _MISSING else f'{value!r:.60}'}")
    return dict(value)


def _prompt(value: Any, input_key: str, arrow: bool) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    expected = f"{input_key!r} must be a string or a list of messages"
    if not isinstance(value, list) or not value:
        raise DataError(f"{expected}, found {type(value).__name__}: {value!r:.60}")
    try:
        return normal_messages(value, arrow=arrow)
    except DataError as e:
        raise DataError(f"{expected}; {e}") from e
