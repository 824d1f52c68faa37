"""`agentrl train --use-rollout-routing-replay` on a tiny mixture of experts with the local engine: from the engine to the optimizer, and again
from the record."""

import asyncio
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from models import make_model

from agentrl.cli.main import main
from agentrl.run.model_folder import ASSETS
from agentrl.store import Recording, read_episodes

WORDS = ["--env", "search_r1", "--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
WORDS += ["--rollout-max-response-len", "48", "--eval-interval", "0", "--lr", "1e-3", "--tensorboard", "false"]
WORDS += ["--use-kl-loss", "--kl-loss-coef", "0.1", "--num-steps-per-rollout", "2", "--use-rollout-routing-replay"]


@pytest.fixture
def model(tmp_path):
    """Of the embedded model's vocabulary and tokenizer."""
    folder = make_model(tmp_path / "model", "qwen3_moe", vocab=2048, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ASSETS / "search_r1_3m" / name, folder)
    return folder


@pytest.fixture
def passes(monkeypatch):
    """(name, rows) of every pass of the trainer."""
    from agentrl.train.megatron.trainer import MegatronTrainer

    found = []

    def noting(name):
        method = getattr(MegatronTrainer, name)

        def call(self, rows, *args, **options):
            found.append((name, rows))
            return method(self, rows, *args, **options)

        monkeypatch.setattr(MegatronTrainer, name, call)

    noting("log_probs")
    noting("step")
    return found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("reused_ranks")
async def test_a_run_trains_with_the_experts_of_its_engine_and_so_does_its_record(tmp_path, model, passes):
    run = tmp_path / "run"
    assert await asyncio.to_thread(main, ["train", *WORDS, "--model", str(model), "--run", str(run)]) == 0
    segments = {(t.episode_id, i): s for t in read_episodes(run) for i, s in enumerate(t.segments)}
    steps = [rows for name, rows in passes if name == "step"]
    assert len(steps) == 4
    for _, rows in passes:  # also those for old log-probs
        for row in rows:
            assert np.array_equal(row.routed_experts, segments[row.source].routed_experts.array())
    first = next(iter(Recording(run).steps))
    metrics = Recording(run).record(first)["metrics"]
    assert metrics["rollout_log_prob_diff_max"] < 1e-3
    passes.clear()
    again = ["train", *WORDS, "--model", str(model), "--train-only", str(run), "--run", str(tmp_path / "again")]
    assert await asyncio.to_thread(main, again) == 0
    repeated = [rows for name, rows in passes if name == "step"]
    for then, now in zip(steps, repeated, strict=True):
        for a, b in zip(then, now, strict=True):
            assert a.source == b.source
            assert np.array_equal(a.routed_experts, b.routed_experts)
