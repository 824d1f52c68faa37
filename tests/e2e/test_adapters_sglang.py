"""A run with two adapters and a genuine SGLang server, which serves both. On a CPU its LoRA needs pinned memory, which is made ordinary memory."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from sglang_server import available, python
from test_adapters_run import BOTH, TWO, WORDS

from agentrl.core.weights_fingerprint import fingerprint

pytestmark = [
    pytest.mark.full,
    pytest.mark.sglang,
    pytest.mark.skipif(not available(), reason="needs SGLang: make setup-sglang-cpu"),
]
UNPINNED = """
import torch
torch.Tensor.pin_memory = lambda self, *_, **__: self
for name in ("tensor", "empty", "zeros", "ones"):
    def make(*args, _make=getattr(torch, name), pin_memory=False, **options):
        return _make(*args, **options)
    setattr(torch, name, make)
"""


async def test_adapters_are_loaded_into_a_server_and_generate(tmp_path):
    import torch

    run = tmp_path / "run"
    words = ["--engine", "sglang", *(["--engine-python", python()] if python() else [])]
    if not torch.cuda.is_available():
        (tmp_path / "sitecustomize.py").write_text(UNPINNED)
        words += ["--engine-pythonpath", str(tmp_path)]
    command = [sys.executable, "-m", "agentrl.cli", "train", *WORDS, *BOTH, *TWO, *words, "--run", str(run)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=540, env=os.environ)
    log = run / "engine/engine0.log"
    assert done.returncode == 0, (
        done.stdout[-3000:] + done.stderr[-3000:] + (log.read_text()[-3000:] if log.exists() else "")
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    limit = 0.5 if torch.cuda.is_available() else 1e-3
    for row in rows:
        assert row["exactness_violations"] == 0
        assert row["sync/log_prob_diff_max"] < limit
        assert all(row[f"train/{name}/rollout_log_prob_diff_max"] < limit for name in ("red", "blue"))
    assert [[row[f"policy_version/{name}"] for row in rows] for name in ("red", "blue")] == [[1, 2, 3]] * 2
    print({name: value for name, value in rows[-1].items() if "diff" in name})
    assert fingerprint(run / "adapter/red") != fingerprint(run / "adapter/blue")
