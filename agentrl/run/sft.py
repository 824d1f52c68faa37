"""`agentrl sft`: supervised fine-tuning on recorded episodes and conversations, with the loss masks of RL.

Tokens written by an expert (DEMONSTRATION) or sampled by a policy have mask 1, all others 0. The run folder holds the episodes and the batch
of each optimizer step, as that of an RL run does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from agentrl import __version__
from agentrl.config import Config
from agentrl.core.program_name import command
from agentrl.core.seeds import derive_seed
from agentrl.data.conversations import Census, read_conversations
from agentrl.data.row_files import SUFFIXES, data_files, data_suffix
from agentrl.errors import ConfigError, DataError, NonFiniteError
from agentrl.run.components import Components
from agentrl.run.recorded_ids import RecordedIds
from agentrl.run.run_log import Echo, RunLog
from agentrl.run.trained_adapters import describe_adapters
from agentrl.run.training import ADAPTER, export_trained, recorded_step, skip_or_stop
from agentrl.store import Recording, from_record
from agentrl.store.run_folder import RunFolder
from agentrl.train.base import LossConfig, Row, Trainer
from agentrl.train.rows import make_rows
from agentrl.train.sample import Sample, to_samples
from agentrl.train.schedule import learning_rate
from agentrl.types import Trajectory

PROGRESS_STEPS = 10
"""optimizer steps between two lines of progress"""


async def sft(config: Config, sources: Sequence[Path], *, echo: Echo = print) -> Path:
    """Train for `sft_epochs` in batches of `sft_batch_size` episodes; the weights are in `hf/` of the run folder, which is returned."""
    if config.lora.lora_adapters:
        raise ConfigError("--lora-adapter is for environments and roles, of which `agentrl sft` has none; leave it out")
    components = Components(config, trains=False)
    components.require_trainable()
    episodes = load_episodes(sources, components, echo)
    samples = [s for t in episodes for s in to_samples(t, demonstrations=True)]
    folder = RunFolder.create(config, __version__)
    trainer: Trainer | None = None
    with RunLog(folder.path, config.run.log_level, echo) as log:
        try:
            trainer = await asyncio.to_thread(components.trainer, folder.path, reference=False)
            for t in episodes:
                folder.episodes.write(t, split="sft")
            batches = make_batches(samples, config)
            log.echo(f"run folder {folder.path}: {len(samples)} samples, {len(batches)} steps")
            if (trained := describe_adapters(config, components.folder)) is not None:
                log.echo(trained)
            started = time.perf_counter()
            for step, batch in enumerate(batches):
                lr = learning_rate(config.train, step, len(batches))
                rows = sft_rows(batch, config)
                try:
                    metrics, rates = await recorded_step(
                        trainer, folder, rows, LossConfig(kind="sft"), lr, step=step, optimizer_step=step + 1
                    )
                except NonFiniteError as e:
                    skip_or_stop(config, step + 1, e)
                    continue
                folder.metrics.write({"step": step, **{f"train/{name}": value for name, value in metrics.items()}})
                folder.timings.write({"step": step, **{f"train/{name}": value for name, value in rates.items()}})
                if step % PROGRESS_STEPS == 0 or step == len(batches) - 1:
                    log.echo(
                        f"step {step + 1:>5} of {len(batches)}  loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.2f}  "
                        f"{time.perf_counter() - started:.0f} s"
                    )
            await asyncio.to_thread(export_trained, trainer, folder)
        finally:
            if trainer is not None:
                await asyncio.to_thread(trainer.close)
            components.close()
            folder.close()
        adapters = f", adapters in {folder.path / ADAPTER}" if config.lora.used else ""
        log.echo(
            f"weights in {folder.path / 'hf'}{adapters}; look at the run in the browser: {command('view', folder.path)}"
        )
    return folder.path


def sft_rows(batch: Sequence[Sample], config: Config) -> list[Row]:
    """The rows of one optimizer step; cross entropy has no advantages."""
    advantages = {s.episode_id: 0.0 for s in batch}
    return make_rows(batch, advantages, "token" if config.train.calculate_per_token_loss else "sequence")


def load_episodes(sources: Sequence[Path], components: Components, echo: Echo) -> list[Trajectory]:
    """Episodes with tokens to train on, of folders of episodes and data sets of conversations; the source's number goes before their ids.

    Raises:
        DataError: a source has no tokens to train on.
    """
    episodes: list[Trajectory] = []
    for number, source in enumerate(sources):
        census = Census()
        conversations = not is_recording(source)
        if conversations:
            read = read_conversations(source, components.renderer, components.context_length, census)
        else:
            read = map(RecordedIds(components, source).check, recorded_episodes(source, echo))
        numbered = (replace(t, episode_id=f"{number}/{t.episode_id}") for t in read)
        trainable = [t for t in numbered if to_samples(t, demonstrations=True)]
        for line in census.lines(str(source), components.context_length) if conversations else ():
            echo(line)
        if not trainable:
            raise DataError(f"{source}: no episode in it has a token to train on")
        episodes += trainable
    return episodes


def is_recording(source: Path) -> bool:
    """Whether a source holds recorded episodes and not conversations."""
    if source.is_dir():
        is_run = (source / "episodes").is_dir() or (source / "config.toml").is_file()
        return is_run or any(source.glob("*.index")) or not _has_data(source)
    return source.is_file() and data_suffix(source) not in SUFFIXES


def _has_data(folder: Path) -> bool:
    try:
        return bool(data_files(str(folder)))
    except DataError:
        return False


def recorded_episodes(source: Path, echo: Echo) -> Iterator[Trajectory]:
    """The recorded episodes of a folder, except those of evaluations, whose tasks are held out.

    Raises:
        DataError: it holds only evaluations.
    """
    recording = Recording(source)
    if recording.note:
        echo(recording.note)
    entries = [entry for entry in recording.episodes if not entry.split.startswith("eval/")]
    if held_out := len(recording.episodes) - len(entries):
        if not entries:
            raise DataError(
                f"{source}: holds only evaluations ({held_out} episodes), which are not trained on; give episodes of training"
            )
        echo(f"{source}: {held_out} episodes of evaluations left out")
    return (from_record(record, recording.blobs) for record in recording.records(entries))


def make_batches(samples: Sequence[Sample], config: Config) -> list[list[Sample]]:
    """Batches of whole episodes, shuffled again in each epoch; the last batch of an epoch may be smaller."""
    episodes: dict[str, list[Sample]] = {}
    for s in samples:
        episodes.setdefault(s.episode_id, []).append(s)
    ids, size = list(episodes), config.sft.sft_batch_size
    batches = []
    for epoch in range(config.sft.sft_epochs):
        Random(derive_seed(config.run.seed, "sft", epoch)).shuffle(ids)
        batches += [[s for id_ in ids[i : i + size] for s in episodes[id_]] for i in range(0, len(ids), size)]
    return batches
