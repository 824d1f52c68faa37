"""Benchmarks that need a GPU or many cores to measure anything run on any machine with small sizes, which shows that they still fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
ROOT = Path(__file__).parents[1]
FIELDS = {"metric", "value", "baseline", "card", "formula", "commit", "command", "date"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("tree", ["--parts", "prompt", "--heads", "all", "--steps", "1", "--model"]),
        ("layouts", ["--layouts", "tp2", "--steps", "1", "--micro-batches", "2", "--models"]),
        ("mfu", ["--parts", "0.6b", "--steps", "1", "--micro-batches", "1", "--no-loop", "--models"]),
    ],
)
def test_a_gpu_benchmark_writes_its_records(tmp_path, script, words):
    command = [
        sys.executable,
        f"benchmarks/gpu/{script}.py",
        "--tiny",
        "--out",
        str(tmp_path),
        *words,
        str(tmp_path / "model"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = json.loads((tmp_path / f"{script}.json").read_text())
    assert set(record) >= FIELDS, record
    assert record["value"]


@pytest.mark.full
def test_the_comparison_of_schedules_writes_its_record_and_curve(tmp_path):
    words = ["--seeds", "0", "--rollouts", "1", "--jobs", "1", "--latency", "0.01", "--out", str(tmp_path)]
    command = [sys.executable, "benchmarks/async_learning.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "async_learning.json").read_text())
    assert {run["schedule"]: [rollouts for rollouts, *_ in run["evaluations"]] for run in record["runs"]} == {
        "sync": [0, 1],
        "async": [0, 1],
    }
    assert (tmp_path / "async_learning.png").read_bytes().startswith(b"\x89PNG")
