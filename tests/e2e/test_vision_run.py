"""`agentrl train --train-only` on recorded episodes with images, whose log-probs are those of transformers with the images."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parents[1] / "render"))

import torch
from doubles import make_runner
from safetensors.torch import load_file
from vision import VisionEngine, call, model_folder, picture, vision_model, vision_renderer

from agentrl import Task, ToolEnv, __version__, reward, tool
from agentrl.cli.main import main
from agentrl.config import build_config
from agentrl.rollout.rollout import Rollout, RolloutLimits
from agentrl.store import Recording, read_episodes
from agentrl.store.run_folder import RunFolder
from agentrl.types import EpisodeSpec

pytestmark = [pytest.mark.full, pytest.mark.slow]
ENV = "from agentrl import ToolEnv\nclass Map(ToolEnv):\n    rewards = []\n    action_format = 'hermes'\n"


class Map(ToolEnv):
    """A map to look at more closely."""

    @tool
    def zoom(self, level: int) -> list:
        """Look closer."""
        return [{"type": "text", "text": f"Level {level}"}, {"type": "image", "image": picture(80, 80, level)}]


@reward
def odd(trajectory):
    return float(trajectory.index % 2)


class Speaker(VisionEngine):
    """Each episode of a group says something else."""

    async def generate(self, ids, sampling, *, session, images=()):
        index = int(session.split("/")[0].split("-")[0])
        self.texts = (call("zoom", level=1 + index % 2), f"Rome {index}.")
        return await super().generate(ids, sampling, session=session, images=images)


@pytest.fixture
async def recorded(tmp_path):
    """(model folder, run folder) of a rollout of two groups of two, each group with its own picture."""
    renderer = vision_renderer()
    hf = vision_model(renderer.images.placeholder_id)
    hf.save_pretrained(tmp_path / "model")
    folder = model_folder(tmp_path / "model", renderer)
    runner = make_runner(Map, Speaker(renderer, hf, ()), renderer, rewards=(odd,), temperature=0.7)
    tasks = [
        Task(
            str(g),
            (
                {
                    "role": "user",
                    "content": [{"type": "image", "image": picture(seed=g)}, {"type": "text", "text": "Where?"}],
                },
            ),
        )
        for g in range(2)
    ]
    specs = [[EpisodeSpec(task, g, 2 * g + i) for i in range(2)] for g, task in enumerate(tasks)]
    groups, _ = await Rollout(runner, RolloutLimits()).run(specs)
    runner.close()
    run = RunFolder.create(
        build_config({"run": str(tmp_path / "run"), "hf_checkpoint": str(folder), "tensorboard": False}), __version__
    )
    for group in groups:
        for t in group.trajectories:
            run.episodes.write(t, step=0, split="train")
    run.close()
    return folder, run.path


async def train(tmp_path, folder, run, *more):
    (tmp_path / "env.py").write_text(ENV)
    words = [
        "train",
        "--train-only",
        run,
        "--run",
        tmp_path / "again",
        "--hf-checkpoint",
        folder,
        "--env",
        tmp_path / "env.py",
    ]
    words += ["--lr", "1e-3", "--tensorboard", "false", "--eval-interval", "0", "--actor-num-gpus-per-node", "1", *more]
    return await asyncio.to_thread(main, list(map(str, words)))


@pytest.mark.usefixtures("reused_ranks")
async def test_what_rollouts_with_images_record_the_trainer_trains(tmp_path, recorded, monkeypatch):
    from agentrl.train.megatron.trainer import MegatronTrainer

    steps, step = [], MegatronTrainer.step
    monkeypatch.setattr(
        MegatronTrainer, "step", lambda self, rows, *a, **k: steps.append(rows) or step(self, rows, *a, **k)
    )
    folder, run = recorded
    assert await train(tmp_path, folder, run) == 0
    segments = {(t.episode_id, i): s for t in read_episodes(run) for i, s in enumerate(t.segments)}
    ((*rows,),) = steps
    assert len(rows) == 4
    for row in rows:
        assert row.images == segments[row.source].images
        assert len(row.images) == 2
    again = Recording(tmp_path / "again")
    metrics = again.record(next(iter(again.steps)))["metrics"]
    assert metrics["grad_norm"] > 0
    assert metrics["rollout_log_prob_diff_max"] < 1e-3, "the trainer sees the images that the engine saw"
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again" / "hf"))
    assert before.keys() == after.keys()
    equal = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert {name for name in before if name.startswith("visual.")} <= equal
    assert "model.layers.0.mlp.down_proj.weight" not in equal


@pytest.mark.usefixtures("reused_ranks")
async def test_recorded_episodes_with_images_are_fine_tuned_on(tmp_path, recorded):
    folder, run = recorded
    words = ["sft", run, "--run", tmp_path / "again", "--hf-checkpoint", folder, "--lr", "1e-2", "--sft-epochs", "3"]
    words += ["--actor-num-gpus-per-node", "1"]
    assert await asyncio.to_thread(main, list(map(str, words))) == 0
    losses = [
        json.loads(line)["train/loss"] for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0] - 0.1


async def test_images_that_are_missing_or_changed_are_refused_before_the_start(tmp_path, recorded, capsys):
    folder, run = recorded
    first, second, *_ = sorted((run / "episodes" / "images").iterdir())
    kept = first.read_bytes()
    first.unlink()
    assert await train(tmp_path, folder, run) == 2
    assert "of an episode cannot be read" in capsys.readouterr().err
    shutil.copy(second, first)
    assert await train(tmp_path, folder, run) == 2
    assert "this is not the image that the episode refers to; was the file changed?" in capsys.readouterr().err
    first.write_bytes(kept)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**settings, "size": {"shortest_edge": 784, "longest_edge": 1568}})
    )
    assert await train(tmp_path, folder, run) == 2
    assert "placeholders, and" in capsys.readouterr().err
    (folder / "preprocessor_config.json").unlink()
    assert await train(tmp_path, folder, run) == 2
    assert "has images, and the model takes none" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
