"""Episodes as Parquet, one row per segment (that is, per training row), for pandas, DuckDB and Hugging Face's `datasets`. Needs pyarrow.

Tokens, masks and log-probs are list columns, rewards a list of names and values. The row of an episode's first segment also holds the
complete record as JSON, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.core.atomic_write import new_file, new_folder
from agentrl.errors import ConfigError
from agentrl.store.episode_record import encode, token_columns

_BATCH = 2000
"""Rows in memory at a time."""
_LIST_COLUMNS = {
    "tokens": ("ids", "int32"),
    "loss_mask": ("mask", "int8"),
    "provenance": ("provenance", "int8"),
    "log_probs": ("log_prob", "float64"),
    "policy_version": ("version", "int32"),
}
"""Columns with a value per token: the name in `token_columns` and the type."""
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
---

Episodes recorded by agentrl, one row per segment of an episode. `loss_mask` is 1 where the policy sampled the token, in a
branch from its first own turn on. `log_probs` are the
engine's, as natural logarithms. `rewards` is a list of `{name, value}`; the value of a component that abstained is null. `record`, in the
row of an episode's first segment, is the complete record as JSON.

```python
from datasets import load_dataset

rows = load_dataset("path/of/this/folder", split="train")
```
"""


def write_parquet(file: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a new file and return the number of rows.

    Raises:
        ConfigError: pyarrow is not installed, or the file exists.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise ConfigError("writing Parquet needs pyarrow; run pip install agentrl[parquet]") from e
    if file.exists():
        raise ConfigError(f"{file} already exists; choose a new file")
    rows, total, schema = (row for record in records for row in rows_of(record)), 0, _schema(pa)
    with new_file(file) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            total += len(batch)
    return total


def write_hf_dataset(folder: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a new folder that `datasets.load_dataset` reads, and return the number of rows.

    Raises:
        ConfigError: pyarrow is not installed, or the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} already exists; choose a new folder")
    with new_folder(folder) as temporary:
        (temporary / "README.md").write_text(_CARD, encoding="utf-8")
        return write_parquet(temporary / "data" / "train-00000-of-00001.parquet", records)


def rows_of(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per segment."""
    answers = [turn["action"]["answer"] for turn in record["turns"] if turn["action"]["answer"] is not None]
    episode = {
        **{name: record[name] for name in ("episode_id", "group_index", "index", "attempt", "env")},
        **{name: record.get(name) for name in ("step", "split")},
        **{name: record[name] for name in ("stop_reason", "status", "score")},
        "task_id": str(record["task"]["id"]),
        "prompt": _text(record["task"]["prompt"]),
        "label": _text(record["task"]["label"]),
        "rewards": [{"name": name, "value": value} for name, value in record["rewards"].items()],
        "turns": len(record["turns"]),
        "answer": answers[-1] if answers else None,
    }
    for number, segment in enumerate(record["segments"]):
        tokens = token_columns(segment, branch_turn=record.get("branch_turn", 0))
        yield {
            **episode,
            "segment": number,
            **{column: tokens[name] for column, (name, _) in _LIST_COLUMNS.items()},
            "record": encode(record).decode() if number == 0 else None,
        }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else encode({"v": value}).decode()[5:-2]


def _schema(pa: Any) -> Any:
    text, number = pa.string(), pa.int64()
    rewards = pa.list_(pa.struct([("name", text), ("value", pa.float64())]))  # `datasets` cannot read maps
    return pa.schema(
        [
            ("episode_id", text),
            *((name, number) for name in ("segment", "group_index", "index", "attempt", "step")),
            *((name, text) for name in ("split", "env", "task_id", "prompt", "label", "stop_reason", "status")),
            ("score", pa.float64()),
            ("rewards", rewards),
            ("turns", number),
            ("answer", text),
            *((column, pa.list_(getattr(pa, kind)())) for column, (_, kind) in _LIST_COLUMNS.items()),
            ("record", text),
        ]
    )
