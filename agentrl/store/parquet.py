"""Episodes as Parquet, one row per segment (that is, per training row), for pandas, DuckDB and Hugging Face's `datasets`. Needs pyarrow.

Tokens, masks and log-probs are columns of lists, rewards a list of names and values; the whole record is there too, as JSON (in the row of
the episode's first segment), so nothing is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.store.episode_record import encode
from agentrl.types import Provenance

_BATCH = 2000
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
---

Episodes recorded by agentrl, one row per segment of an episode. `loss_mask` is 1 where the policy sampled the token; `log_probs` are the
engine's, natural logs; `rewards` is a list of `{name, value}`, a component that abstained has no value; `record`, in the row of an
episode's first segment, is the whole record as JSON.

```python
from datasets import load_dataset

rows = load_dataset("path/of/this/folder", split="train")
```
"""


def write_parquet(file: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a new file; returns the number of rows.

    Raises:
        ConfigError: pyarrow is not installed, or the file exists.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise ConfigError("writing Parquet needs pyarrow; pip install pyarrow") from e
    if file.exists():
        raise ConfigError(f"{file} exists already; give a new file")
    rows, total = (row for r in records for row in rows_of(r)), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    try:
        with pq.ParquetWriter(part, _schema(pa), compression="zstd") as writer:
            while batch := list(islice(rows, _BATCH)):
                writer.write_table(pa.Table.from_pylist(batch, _schema(pa)))
                total += len(batch)
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)
    return total


def write_hf_dataset(folder: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """A new folder that `datasets.load_dataset` reads; returns the number of rows.

    Raises:
        ConfigError: as `write_parquet`.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; give a new folder")
    part = folder.with_name(f".{folder.name}.part")
    try:
        total = write_parquet(part / "data" / "train-00000-of-00001.parquet", records)
        (part / "README.md").write_text(_CARD, encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return total


def rows_of(r: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per segment."""
    whole = encode(r).decode()
    for n, segment in enumerate(r["segments"]):
        spans = segment["spans"]
        yield {
            "episode_id": r["episode_id"],
            "segment": n,
            "group_index": r["group_index"],
            "index": r["index"],
            "attempt": r["attempt"],
            "step": r.get("step"),
            "split": r.get("split"),
            "env": r["env"],
            "task_id": str(r["task"]["id"]),
            "prompt": _text(r["task"]["prompt"]),
            "label": _text(r["task"]["label"]),
            "stop_reason": r["stop_reason"],
            "status": r["status"],
            "score": r["score"],
            "rewards": [{"name": k, "value": v} for k, v in r["rewards"].items()],
            "turns": len(r["turns"]),
            "answer": next(
                (t["action"]["answer"] for t in reversed(r["turns"]) if t["action"]["answer"] is not None), None
            ),
            "tokens": [i for s in spans for i in s["ids"]],
            "loss_mask": [int(s["provenance"] == "SAMPLED") for s in spans for _ in s["ids"]],
            "provenance": [int(Provenance[s["provenance"]]) for s in spans for _ in s["ids"]],
            "log_probs": [v for s in spans for v in (s.get("log_probs") or [None] * len(s["ids"]))],
            "policy_version": [s.get("policy_version") for s in spans for _ in s["ids"]],
            "record": whole if n == 0 else None,
        }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else encode({"v": value}).decode()[5:-2]


def _schema(pa: Any) -> Any:
    text, number = pa.string(), pa.int64()
    lists = {
        "tokens": pa.int32(),
        "loss_mask": pa.int8(),
        "provenance": pa.int8(),
        "log_probs": pa.float64(),
        "policy_version": pa.int32(),
    }
    return pa.schema(
        [
            ("episode_id", text),
            *((n, number) for n in ("segment", "group_index", "index", "attempt", "step")),
            *((n, text) for n in ("split", "env", "task_id", "prompt", "label", "stop_reason", "status")),
            ("score", pa.float64()),
            ("rewards", pa.list_(pa.struct([("name", text), ("value", pa.float64())]))),  # `datasets` reads no maps
            ("turns", number),
            ("answer", text),
            *((n, pa.list_(kind)) for n, kind in lists.items()),
            ("record", text),
        ]
    )
