"""Parquet: one row per segment, with the arrays of the sample and the complete record."""

import json

import pytest
from doubles import OBSERVATION, PROMPT, SAMPLED, span, trajectory

from agentrl.errors import ConfigError
from agentrl.store import extra_fields, from_record, to_record
from agentrl.store.parquet import rows_of, write_hf_dataset, write_parquet
from agentrl.train.sample import to_samples

SEGMENT = [span(PROMPT, (1, 2), -1), span(SAMPLED, (3, 4)), span(OBSERVATION, (5,)), span(SAMPLED, (6,), 1)]


def records():
    return [to_record(trajectory([SEGMENT, SEGMENT], index=i, score=i / 2), step=0, split="train") for i in range(3)]


def test_rows_hold_the_arrays_of_the_samples():
    (record, *_) = records()
    rows = list(rows_of(record))
    samples = to_samples(from_record(record))
    assert [r["tokens"] for r in rows] == [s.tokens for s in samples]
    assert [r["loss_mask"][-s.response_length :] for r, s in zip(rows, samples, strict=True)] == [
        s.loss_mask for s in samples
    ]
    assert [v or 0.0 for v in rows[0]["log_probs"][2:]] == samples[0].rollout_log_probs
    assert from_record(json.loads(rows[0]["record"])) == from_record(json.loads(json.dumps(record)))
    assert extra_fields(json.loads(rows[0]["record"])) == {"step": 0, "split": "train"}


def test_every_column_has_a_type_that_datasets_reads(tmp_path):
    """`datasets` has features for lists and structs, not for maps."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_hf_dataset(tmp_path / "d", records())
    kinds = [f.type for f in pq.read_schema(tmp_path / "d" / "data" / "train-00000-of-00001.parquet")]
    while kinds:
        kind = kinds.pop()
        assert not pa.types.is_map(kind)
        kinds += [kind.field(i).type for i in range(kind.num_fields)]


def test_datasets_reads_it(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    write_hf_dataset(tmp_path / "d", records())
    rows = datasets.load_dataset(str(tmp_path / "d"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 6
    assert rows[3]["rewards"] == [{"name": "r", "value": 0.5}]
    assert rows[3]["tokens"] == [1, 2, 3, 4, 5, 6]


def test_a_file_and_a_dataset_are_written_once(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    assert write_parquet(tmp_path / "a.parquet", records()) == 6
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert table[3]["tokens"] == [1, 2, 3, 4, 5, 6]
    assert table[2]["rewards"] == [{"name": "r", "value": 0.5}]
    with pytest.raises(ConfigError, match="already exists"):
        write_parquet(tmp_path / "a.parquet", records())
    assert write_hf_dataset(tmp_path / "d", records()) == 6
    assert "data/*.parquet" in (tmp_path / "d" / "README.md").read_text()
