"""Whole runs of search_r1 with what only a few estimators use: a critic on ranks of its own, and branches."""

import asyncio
import json
import shutil

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from agentrl.cli.main import main
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.store import Recording, from_record
from agentrl.train.sample import to_samples
from agentrl.train.step_record import rebuild_rows

WORDS = ["--env", "search_r1", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
WORDS += ["--eval-interval", "0", "--lr", "1e-4", "--tensorboard", "false", "--actor-num-gpus-per-node", "1"]

pytestmark = pytest.mark.full


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


async def test_a_resumed_run_of_ppo_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    words = ["--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--save-interval", "2", "--run", str(run)]
    assert await asyncio.to_thread(main, ["train", *WORDS, *words]) == 0
    rows = metrics_of(run)
    assert all(row["train/critic_grad_norm"] > 0 for row in rows)
    assert rows[0]["train/value_mean"] == 0, "values start at 0"
    assert rows[-1]["train/value_mean"] > 0.05, "and rise towards the returns"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "000003")
    assert await asyncio.to_thread(main, ["train", "--resume", str(again)]) == 0
    assert metrics_of(again) == rows
    assert fingerprint(again / "hf") == fingerprint(run / "hf")


async def test_a_run_with_branches_replays_and_its_rows_are_rebuilt_from_the_record(tmp_path):
    run = tmp_path / "run"
    words = ["--advantage-estimator", "branch_rloo", "--branch-at", "1", "--branch-samples", "2", "--run", str(run)]
    assert await asyncio.to_thread(main, ["train", *WORDS, *words, "--num-steps-per-rollout", "2"]) == 0
    assert await asyncio.to_thread(main, ["replay", str(run)]) == 0
    assert all(row["branches"] > 16 and row["branches_refused"] == 0 for row in metrics_of(run))
    recording = Recording(run)
    samples = {e.id: to_samples(from_record(recording.record(e))) for e in recording.episodes}
    steps = [recording.record(entry) for entry in recording.steps]
    assert len(steps) >= 5
    of_branches = 0
    for record in steps:
        rows = rebuild_rows(record, lambda episode, segment: samples[episode][segment])
        by_tree = {row.source[0].rpartition("/")[2] for row in rows}
        assert len(by_tree) <= 8, "the trees of a rollout are divided between its steps"
        of_branches += sum(row.source[0].startswith("branch/1.") for row in rows)
    assert of_branches, "siblings whose scores differ are trained on"
