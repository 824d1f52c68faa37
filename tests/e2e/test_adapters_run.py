"""Whole runs with several adapters: of two environments and of two roles, resumed, trained again from the record, and each by itself."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from agentrl.cli.main import main
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.run import train_only
from agentrl.store import read_episodes
from agentrl.store.episode_files import all_records

pytestmark = pytest.mark.full
ENVS = Path(__file__).with_name("adapter_envs.py")
ASKING, READING = f"{ENVS}:Asking", f"{ENVS}:Reading"
LIMITS = ["--max-turns", "4", "--max-invalid-actions", "1", "--rollout-max-response-len", "384", "--threads", "1"]
LIMITS += ["--rollout-max-context-len", "512", "--max-tokens-per-turn", "40", "--hf-checkpoint", "search_r1_3m"]
WORDS = [
    *LIMITS,
    "--rollout-batch-size",
    "4",
    "--n-samples-per-prompt",
    "4",
    "--eval-interval",
    "0",
    "--tensorboard",
    "false",
]
WORDS += ["--lr", "1e-3", "--lora-rank", "4", "--save-interval", "2", "--entropy-coef", "0.01"]
BOTH = ["--env", f"{ASKING}=0.5 {READING}=0.5", "--num-rollout", "3"]
TWO = ["--lora-adapter", f"{ASKING}=red", "--lora-adapter", f"{READING}=blue"]


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


async def agentrl(*words):
    return await asyncio.to_thread(main, [*map(str, words)])


async def test_each_environment_trains_its_adapter_as_if_it_were_alone(tmp_path, monkeypatch):
    """Bit for bit: resumed; trained again from the record; and each adapter by itself, on the episodes of its environment."""
    run, again, taught = (tmp_path / name for name in ("run", "again", "taught"))
    assert await agentrl("train", *WORDS, *BOTH, *TWO, "--run", run) == 0
    rows = metrics_of(run)
    for row in rows:
        assert row["exactness_violations"] == 0
        for name in ("red", "blue"):
            assert row[f"train/{name}/rollout_log_prob_diff_max"] < 1e-3, (
                "the engine plays with the adapter of the episode"
            )
        assert row["train/rows"] == row["train/red/rows"] + row["train/blue/rows"]
    assert [[row[f"policy_version/{name}"] for row in rows] for name in ("red", "blue")] == [[1, 2, 3]] * 2
    assert {t.env for t in read_episodes(run / "episodes")} == {"Asking", "Reading"}
    own = {name: fingerprint(run / "adapter" / name) for name in ("red", "blue")}
    assert own["red"] != own["blue"]
    assert not (run / "hf").exists()

    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "000003")
    assert await agentrl("train", "--resume", again) == 0
    assert metrics_of(again) == rows
    assert {name: fingerprint(again / "adapter" / name) for name in own} == own

    assert await agentrl("train", "--train-only", run, "--run", taught) == 0
    assert {name: fingerprint(taught / "adapter" / name) for name in own} == own

    complete, settings = train_only.complete_groups, run / "config.toml"
    refused = ["--train-only", run, "--env", ASKING, "--run", tmp_path / "refused"]
    assert await agentrl("train", *refused) == 2, "there is an adapter of no environment"
    settings.write_text(re.sub(r"(?m)^\[lora\.lora_adapters\]\n(.+\n)*", "", settings.read_text()))
    for env, label, name in ((ASKING, "Asking", "red"), (READING, "Reading", "blue")):
        alone = tmp_path / name
        monkeypatch.setattr(
            train_only,
            "complete_groups",
            lambda attempts, size, label=label: complete([t for t in attempts if t.env == label], size),
        )
        assert await agentrl("train", "--train-only", run, "--env", env, "--run", alone) == 0
        assert fingerprint(alone / "adapter") == own[name]


async def test_each_role_trains_its_adapter_on_its_own_turns(tmp_path):
    run = tmp_path / "run"
    words = [*WORDS, "--env", f"{ENVS}:Pair", "--num-rollout", "2", "--lora-adapter", "first=red"]
    words += ["--lora-adapter", "second=blue"]
    assert await agentrl("train", *words, "--run", run) == 0
    for row in metrics_of(run):
        for name in ("red", "blue"):
            assert row[f"train/{name}/rows"] > 0
            assert row[f"train/{name}/rollout_log_prob_diff_max"] < 1e-3
    steps = [record for record in all_records(run / "episodes") if "optimizer_step" in record]
    assert {(s["adapter"], r["role"]) for s in steps for r in s["rows"]} == {("red", "first"), ("blue", "second")}
    assert fingerprint(run / "adapter/red") != fingerprint(run / "adapter/blue")
