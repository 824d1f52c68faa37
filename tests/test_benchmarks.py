"""Benchmarks that need a GPU or many cores to measure anything run on any machine with small sizes, which shows that they still fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_server import available, python

pytest.importorskip("megatron.core", reason="needs megatron-core")
ROOT = Path(__file__).parents[1]
FIELDS = {"metric", "value", "baseline", "card", "formula", "commit", "command", "date"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("tree", ["--parts", "prompt", "--heads", "all", "--steps", "1", "--model"]),
        ("layouts", ["--layouts", "tp2", "--steps", "1", "--micro-batches", "2", "--models"]),
        ("layouts", ["--layouts", "ep2", "--steps", "1", "--micro-batches", "2", "--models"]),
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
@pytest.mark.sglang
@pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu")
def test_router_replay_brings_the_trainer_closer_to_sglang_in_every_case(tmp_path):
    words = ["--tiny", "--out", str(tmp_path), "--models", str(tmp_path), "--episodes", "4", "--sampled", "32"]
    words += ["--engine-python", python()] if python() else []
    command = [sys.executable, "benchmarks/gpu/router_replay.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    records = json.loads((tmp_path / "router_replay.json").read_text())
    assert len(records) == 2
    for record in records:
        assert set(record) >= FIELDS
        assert record["value"]["mean"] < record["baseline"]["mean"]


@pytest.mark.full
@pytest.mark.sglang
@pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu")
def test_asynchronous_training_on_two_cards_writes_its_record_with_every_check(tmp_path):
    words = [
        "--tiny",
        "--out",
        str(tmp_path),
        "--latency",
        "0.05",
        *(["--engine-python", python()] if python() else []),
    ]
    command = [sys.executable, "benchmarks/gpu/async_two_cards.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "async_two_cards.json").read_text())
    assert set(record) >= FIELDS
    assert record["checks"]["no exactness violation"]
    assert {name: len(run["rewards"]) for name, run in record["runs"].items()} == {"sync": 4, "async": 4}


@pytest.mark.full
def test_a_mixture_of_experts_is_trained_with_and_without_replay_and_the_record_has_the_mismatch(tmp_path):
    # the policy answers many questions in all episodes of a group: an entropy term makes every group worth training on
    small = "--rollout-batch-size 2 --eval-limit 4 --rollout-temperature 1.3 --entropy-coef 0.01"
    words = "--processes 1 --jobs 1 --batch 8 --sft-steps 2 --rollouts 1 --eval-interval 1 --only".split()
    words += ["float32, replay", "float32", "--out", str(tmp_path), "--keep", str(tmp_path / "runs")]
    command = [sys.executable, "benchmarks/moe_learning.py", *words, "--", *small.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (tmp_path / "moe_learning_cpu.json").exists(), done.stderr[-2000:]
    record = json.loads((tmp_path / "moe_learning_cpu.json").read_text())
    assert done.returncode == int(record["value"] < record["baseline"]), done.stderr[-2000:]
    assert [run["name"] for run in record["runs"]] == ["float32, replay", "float32"]
    assert all(0 < run["largest_mismatch"] < 1e-3 and len(run["evaluations"]) == 2 for run in record["runs"])
    assert (tmp_path / "moe_learning_cpu.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.slow
def test_the_benchmark_of_estimators_reaches_the_optimum_and_writes_its_record(tmp_path):
    out = tmp_path / "estimators.json"
    command = [
        sys.executable,
        "benchmarks/estimators.py",
        "--seeds",
        "0",
        "--only",
        "dr_grpo",
        "branch_rloo",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["value"] == 1.0, "every run reaches the optimum"
    assert [(r["task"], r["estimator"]) for r in record["rows"]] == [
        ("bandit", "dr_grpo"),
        ("credit", "dr_grpo"),
        ("credit", "branch_rloo"),
    ]


@pytest.mark.full
def test_the_curves_of_estimators_are_drawn_over_their_sampled_tokens(tmp_path):
    small = ["--rollout-batch-size", "2", "--eval-limit", "4", "--actor-num-gpus-per-node", "1"]
    command = [
        sys.executable,
        "benchmarks/estimator_curves.py",
        "--jobs",
        "2",
        "--rollouts",
        "1",
        "--eval-interval",
        "1",
    ]
    command += ["--only", "grpo", "branch_rloo", "distillation", "--out", str(tmp_path), "--", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "estimator_curves.json").read_text())
    assert [r["estimator"] for r in record["runs"]] == ["grpo", "branch_rloo", "distillation"]
    assert all(len(r["points"]) == 2 for r in record["runs"])
    assert (tmp_path / "estimator_curves.png").stat().st_size > 1000


@pytest.mark.full
@pytest.mark.parametrize("flavour", ["local", "servers", "engines", "async", "ray", "all"])
def test_a_run_whose_processes_are_killed_loses_nothing(flavour, tmp_path, monkeypatch):
    """A kill of each kind of process, and the record that a second call continues."""
    if flavour in ("ray", "all"):
        pytest.importorskip("ray")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import chaos

    victims, out = chaos.FLAVOURS[flavour].victims, tmp_path / "chaos.json"
    for count in (1, 1, len(victims) + 1) if flavour == "local" else (1,):
        words = ["--count", str(count), "--kills", str(len(victims)), "--flavours", flavour, "--out", str(out)]
        command = [sys.executable, "benchmarks/chaos.py", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    record = json.loads(out.read_text())
    runs = 2 if flavour == "local" else 1
    assert record["kills"] == dict.fromkeys(victims, runs)
    assert (record["value"], record["faults"]) == (runs * len(victims), [])
    assert [run["seed"] for run in record["runs"]] == list(range(runs)), "a record with enough kills is left as it is"


def test_what_a_run_lost_or_counted_twice_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import chaos

    def faults(rows, episodes):
        lines = [{"step": n, "policy_version": n + 1, "exactness_violations": 0} | row for n, row in enumerate(rows)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        monkeypatch.setattr(chaos, "read_records", lambda folder: episodes)
        return [fault.partition(" ")[0] for fault in chaos.unaccounted(tmp_path, 2)]

    good = [{"split": "train", "status": "completed", "step": n // 8, "index": n} for n in range(16)]
    failed = {"split": "train", "status": "failed", "step": 0, "index": 3}
    assert faults([{}, {}], [*good, failed]) == []
    assert faults([{}], good) == ["rollouts"]
    assert faults([{}, {"policy_version": 3}], good) == ["rollouts"]
    assert faults([{}, {"exactness_violations": 1}], good) == ["violations"]
    assert faults([{}, {}], good[:-1]) == ["episodes"]
    assert faults([{}, {}], [*good[:-1], good[8]]) == ["episodes"]
    assert "twice" in chaos.unaccounted(tmp_path, 2)[0]


@pytest.mark.full
def test_the_comparison_of_a_black_box_with_its_native_environment_writes_its_record_and_curve(tmp_path):
    small = "--rollout-batch-size 2 --n-samples-per-prompt 3 --eval-limit 4 --eval-interval 1 --lr-warmup-rollouts 0 --actor-num-gpus-per-node 1"
    words = ["--rollouts", "1", "--out", str(tmp_path), "--keep", str(tmp_path / "runs"), "--", *small.split()]
    command = [sys.executable, "benchmarks/black_box_learning.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "black_box_learning.json").read_text())
    assert (record["value"], record["seeds_with_equal_weights"]) == (0.0, [0])
    assert [[step for step, _ in run["evaluations"]] for run in record["runs"]] == [[0, 1]] * 2
    assert (tmp_path / "black_box_learning.png").read_bytes().startswith(b"\x89PNG")
