"""Supervised fine-tuning on recorded episodes or on conversations, with the masks of RL: what an expert wrote (DEMONSTRATION) or a policy
sampled has mask 1, everything else 0. The run folder holds the episodes and what the trainer was fed of them, as that of an RL run does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from agentrl import __version__
from agentrl.config import Config
from agentrl.core.seeds import derive_seed
from agentrl.data.conversations import read_conversations
from agentrl.errors import DataError
from agentrl.run.components import Components
from agentrl.run.training import Print
from agentrl.store import Recording, from_record
from agentrl.store.run_folder import RunFolder
from agentrl.train.base import LossConfig, Trainer
from agentrl.train.rows import make_rows
from agentrl.train.sample import Sample, to_samples
from agentrl.train.schedule import sft_learning_rate
from agentrl.train.step_record import step_record
from agentrl.types import Trajectory


async def sft(config: Config, sources: Sequence[Path], *, out: Print = print) -> Path:
    """`sft_epochs` passes in optimizer steps of `sft_batch_size` episodes; the weights go to `hf/` in the run folder, which is returned."""
    components = Components(config, trains=False)
    components.require_trainable()
    episodes = load_episodes(sources, components, out)
    samples = [s for t in episodes for s in to_samples(t, demonstrations=True)]
    folder = RunFolder.create(config, __version__)
    trainer = await asyncio.to_thread(components.trainer, folder.path, reference=False)
    try:
        for t in episodes:
            folder.episodes.write(t, split="sft")
        batches = make_batches(samples, config)
        out(f"run folder {folder.path}: {len(samples)} samples, {len(batches)} steps")
        began = time.perf_counter()
        for step, batch in enumerate(batches):
            rate = sft_learning_rate(config, step, len(batches))
            row = await asyncio.to_thread(_step, trainer, folder, config, batch, step, rate)
            if step % 10 == 0 or step == len(batches) - 1:
                out(
                    f"step {step + 1:>5} of {len(batches)}  loss {row['loss']:.4f}  grad {row['grad_norm']:.2f}  {time.perf_counter() - began:.0f} s"
                )
        await asyncio.to_thread(trainer.export_weights, folder.path / "hf")
    finally:
        await asyncio.to_thread(trainer.close)
        components.close()
        folder.close()
    out(f"weights in {folder.path / 'hf'}")
    return folder.path


def _step(
    trainer: Trainer, folder: RunFolder, config: Config, batch: Sequence[Sample], step: int, rate: float
) -> dict[str, float]:
    """One optimizer step and its record."""
    loss = LossConfig(kind="sft")
    flat = {s.episode_id: 0.0 for s in batch}
    rows = make_rows(batch, flat, "token" if config.train.calculate_per_token_loss else "sequence")
    metrics: dict[str, Any] = trainer.step(rows, loss, rate)
    where = {"step": step, "optimizer_step": step + 1, "loss": asdict(loss), "lr": rate}
    folder.episodes.write_step(**step_record(rows, trainer, metrics.pop("log_probs"), **where), metrics=metrics)
    folder.metrics.write({"step": step, **{f"train/{k}": v for k, v in metrics.items()}})
    return metrics


def load_episodes(sources: Sequence[Path], components: Components, out: Print) -> list[Trajectory]:
    """Episodes of store folders and of JSONL files of conversations that have something to train on, each under a name of its own.

    Raises:
        DataError: nothing in one of the sources can be trained on.
    """
    found: list[Trajectory] = []
    for number, source in enumerate(sources):
        written = source.suffix == ".jsonl"
        read = (
            read_conversations(source, components.renderer, components.context_length)
            if written
            else recorded(source, out)
        )
        # ordinals count from 0 in every source
        named = (replace(t, episode_id=f"{number}/{t.episode_id}") for t in read)
        kept = [t for t in named if to_samples(t, demonstrations=True)]
        if not kept:
            raise DataError(f"{source}: no episode in it has a token to train on")
        found += kept
    return found


def recorded(source: Path, out: Print) -> Iterator[Trajectory]:
    """All episodes of a store but those of evaluations, whose tasks are held out; says what is to be known of it.

    Raises:
        DataError: there are only evaluations.
    """
    recording = Recording(source)
    if recording.note:
        out(recording.note)
    entries = [e for e in recording.episodes if not e.split.startswith("eval/")]
    if held_out := len(recording.episodes) - len(entries):
        if not entries:
            raise DataError(
                f"{source}: holds only evaluations ({held_out} episodes), which are not trained on; give episodes of training"
            )
        out(f"{source}: {held_out} episodes of evaluations left out")
    return (from_record(r, recording.images) for r in recording.records(entries))


def make_batches(samples: Sequence[Sample], config: Config) -> list[list[Sample]]:
    """Whole episodes, shuffled anew in each epoch; the last, smaller batch of an epoch is kept."""
    episodes: dict[str, list[Sample]] = {}
    for s in samples:
        episodes.setdefault(s.episode_id, []).append(s)
    names, size = list(episodes), config.sft.sft_batch_size
    batches = []
    for epoch in range(config.sft.sft_epochs):
        Random(derive_seed(config.run.seed, "sft", epoch)).shuffle(names)
        batches += [[s for n in names[i : i + size] for s in episodes[n]] for i in range(0, len(names), size)]
    return batches
