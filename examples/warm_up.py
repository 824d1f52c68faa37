"""Give the embedded policy the format of an example: record scripted episodes of its environment, then train on them with `agentrl sft`.

    python examples/warm_up.py examples/self_play OUT                # weights in OUT/hf

The folder holds config.toml and demonstrator.py, whose function `write(text, random)` returns the next turn after the context `text`. The
demonstrators know the format and rarely the task: what is rewarded, reinforcement learning has to find out.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

from agentrl.config import build_config, read_toml
from agentrl.core.registry import load_file
from agentrl.engine.scripted import ScriptedEngine, ScriptedRequest
from agentrl.rollout.rollout import Rollout
from agentrl.run.components import Components
from agentrl.run.run_tasks import training_source
from agentrl.store import EpisodeWriter


async def record(folder: Path, out: Path, episodes: int) -> None:
    """Play and record scripted episodes with the settings of an example."""
    size = {"n_samples_per_prompt": 1, "num_rollout": 1, "min_group_size": 1}
    components = Components(build_config(read_toml(folder / "config.toml"), size), trains=False)
    await components.require_env()
    write, tokenizer = load_file(folder / "demonstrator.py").write, components.tokenizer

    def script(request: ScriptedRequest) -> str:
        return str(write(request.text, Random(request.sampling.seed)))

    ends = components.renderer.stop_token_ids
    engine = ScriptedEngine(
        script, encode=tokenizer.encode, decode=tokenizer.decode, end_id=ends[0] if ends else None, demonstration=True
    )
    runner = components.runner(engine, components.runner_settings("train"))
    groups, table = await Rollout(runner, components.rollout_limits()).run(
        training_source(components).get_samples(episodes)
    )
    runner.close()
    components.close()
    writer = EpisodeWriter(out)
    for trajectory in (t for group in groups for t in group.trajectories):
        writer.write(trajectory, step=0, split="train")
    writer.close()
    print(f"{len(groups)} episodes recorded in {out}; failures: {table.failures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an example, such as examples/self_play")
    parser.add_argument("out", type=Path, help="new folder for the episodes and the weights")
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists; name a new folder")
    asyncio.run(record(args.folder, args.out / "episodes", args.episodes))
    words = ["sft", args.out / "episodes", "--config", args.folder / "config.toml", "--run", args.out / "sft"]
    words += ["--sft-epochs", args.epochs, "--sft-batch-size", 32, "--lr", "1e-3", "--lr-warmup-rollouts", 5]
    subprocess.run([sys.executable, "-m", "agentrl.cli", *map(str, words)], check=True)
    shutil.copytree(args.out / "sft" / "hf", args.out / "hf")


if __name__ == "__main__":
    main()
