"""Whole runs of search_r1 with adapters: resumed, continued from an adapter, with a KL term, and taught."""

import asyncio
import json
import shutil

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
from safetensors.torch import load_file, save_file

from agentrl.cli.main import main
from agentrl.core.weights_fingerprint import fingerprint
from agentrl.run.model_folder import ASSETS

pytestmark = pytest.mark.full
WORDS = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-interval", "0", "--tensorboard", "false"]
WORDS += ["--env", "search_r1", "--lr", "1e-3", "--actor-num-gpus-per-node", "1"]


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


async def agentrl(*words):
    return await asyncio.to_thread(main, [*map(str, words)])


async def test_a_resumed_run_of_adapters_ends_with_the_weights_of_one_that_was_not_interrupted(tmp_path, capsys):
    """The reference is the base without a second model; what a later run starts from is what the engine then serves."""
    run, again, further, model = (tmp_path / name for name in ("run", "again", "further", "model"))
    shutil.copytree(ASSETS / "search_r1_3m", model)
    words = [
        "--hf-checkpoint",
        str(model),
        "--lora-rank",
        "4",
        "--num-rollout",
        "3",
        "--save-interval",
        "2",
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.01",
    ]
    assert await agentrl("train", *WORDS, *words, "--run", run) == 0
    rows = metrics_of(run)
    assert rows[0]["train/kl_loss"] < 1e-10, "a new adapter is the base"
    assert rows[-1]["train/kl_loss"] > 1e-7
    assert all(row["train/rollout_log_prob_diff_max"] < 1e-3 for row in rows), "the engine has the merged weights"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "000003")
    assert await agentrl("train", "--resume", again) == 0
    assert metrics_of(again) == rows
    for folder in ("hf", "adapter"):
        assert fingerprint(again / folder) == fingerprint(run / folder)

    assert (
        await agentrl(
            "train",
            *WORDS,
            "--num-rollout",
            "1",
            "--lora-adapter-path",
            run / "adapter",
            "--hf-checkpoint",
            model,
            "--run",
            further,
        )
        == 0
    )
    (first,) = metrics_of(further)
    assert first["train/rollout_log_prob_diff_max"] < 1e-3, "the engine has the adapters from the first rollout on"
    assert fingerprint(further / "hf") != fingerprint(run / "hf")

    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, file, {"format": "pt"})
    capsys.readouterr()
    assert await agentrl("train", "--resume", again, "--num-rollout", "4") == 2
    assert "holds adapters of another base" in capsys.readouterr().err


async def test_adapters_are_taught_on_recorded_episodes(tmp_path):
    run = tmp_path / "run"
    assert (
        await agentrl("rollout", *WORDS[:4], "--env", "search_r1", "--num-rollout", "1", "--run", tmp_path / "played")
        == 0
    )
    words = [
        "--lora-rank",
        "4",
        "--lora-target-modules",
        "q_proj",
        "v_proj",
        "--lr",
        "1e-3",
        "--sft-epochs",
        "3",
        "--sft-batch-size",
        "8",
    ]
    assert await agentrl("sft", tmp_path / "played", *words, "--run", run) == 0
    losses = [row["train/loss"] for row in metrics_of(run)]
    assert losses[-1] < losses[0]
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "v_proj"])
