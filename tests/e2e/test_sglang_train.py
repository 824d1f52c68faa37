"""`agentrl train --engine sglang` on a CPU, with each way of syncing weights, in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mutations.faults import Fault
from mutations.test_mutations import copy_source, plant
from sglang_server import available, python

from agentrl.engine.sglang.installation import find_installation

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu"),
]

# the embedded policy answers nearly all questions: a higher temperature and an entropy term make every group worth training on
SMALL = [
    *(
        "--env",
        "search_r1",
        "--engine",
        "sglang",
        "--num-rollout",
        "3",
        "--rollout-batch-size",
        "2",
        "--n-samples-per-prompt",
        "4",
    ),
    *(
        "--rollout-temperature",
        "1.3",
        "--entropy-coef",
        "0.01",
        "--eval-interval",
        "0",
        "--save-interval",
        "100",
        "--tensorboard",
        "false",
    ),
]


def start(run: Path, *flags: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentrl.cli", "train", *SMALL, "--run", str(run), *flags]
    if python():
        command += ["--engine-python", python()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def rows(run: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def check(run: Path, out: str) -> list[dict]:
    steps = [r for r in rows(run) if "policy_version" in r]
    assert [r["policy_version"] for r in steps] == [1, 2, 3], out[-3000:]
    assert all(r["exactness_violations"] == 0 for r in steps)
    assert all(r["sync/log_prob_diff_max"] < 1e-4 for r in steps)
    assert all(r["train/rollout_log_prob_diff_max"] < 1e-4 for r in steps)
    return steps


ADAPTERS = ["--lora-rank", "4", "--lr", "1e-3"]


@pytest.mark.parametrize(
    ("sync", "flags"),
    [
        ("colocated", []),
        ("split", []),
        pytest.param("disk", [], marks=pytest.mark.full),
        *[pytest.param(sync, ADAPTERS, marks=pytest.mark.full) for sync in ("colocated", "split", "disk")],
    ],
)
def test_training_with_each_sync(tmp_path, sync, flags):
    """Through the disk in the full tests only: tests/engine/test_sglang.py has it with a genuine server too. Adapters arrive merged."""
    run = tmp_path / "run"
    process = start(run, "--weight-sync", sync, *flags)
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out[-3000:]
    check(run, out)


ALTERED = Fault(
    "a tensor is altered on its way",
    "train/megatron/delivery/buckets.py",
    "current.add(name, tensor, shape)",
    "current.add(name, tensor * 1.5 if '.0.post_attention_layernorm.' in name else tensor, shape)",
    "",
)


@pytest.mark.full
@pytest.mark.parametrize("sync", ["colocated", "split"])
def test_one_tensor_that_is_altered_on_its_way_is_refused(tmp_path, sync):
    """Through the disk: tests/engine/test_sglang.py."""
    (tmp_path / "source").mkdir()
    source = copy_source(tmp_path / "source")
    plant(source, ALTERED)
    run = tmp_path / "run"
    server = ["--engine-python", str(find_installation(python()).python)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    process = start(run, "--weight-sync", sync, *server, cwd=source, env=environment)
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 1, out[-3000:]
    assert re.search(r"1 of \d+ parameters at http\S+ differ from the trainer's: \S+post_attention_layernorm", out), (
        out[-3000:]
    )
    assert not [row for row in rows(run) if row.get("policy_version")], (
        "nothing is played or recorded with other weights"
    )


@pytest.mark.full
def test_a_server_killed_in_the_middle_is_replaced_and_nothing_is_lost(tmp_path):
    run = tmp_path / "run"
    process = start(run, "--weight-sync", "colocated")

    def kill_after_the_first_step() -> None:
        while (process.poll() is None and not (run / "metrics.jsonl").exists()) or not rows(run):
            time.sleep(0.2)
        time.sleep(0.5)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _is_scheduler(entry, process.pid):
                os.kill(int(entry.name), signal.SIGKILL)

    killer = threading.Thread(target=kill_after_the_first_step, daemon=True)
    killer.start()
    out, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, out[-3000:]
    steps = check(run, out)
    assert all(r["episodes"] == 8 for r in steps if "episodes" in r)


def _is_scheduler(entry: Path, parent: int) -> bool:
    """A server's first process, started by the run."""
    try:
        command = (entry / "cmdline").read_bytes()
        mother = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return b"sglang.launch_server" in command and mother == parent
