"""Converts weights between Hugging Face folders and the trainer's distributed checkpoints, by a trainer of one rank. No torch here.

The rank holds weights, gradients and the optimizer's copy: about 16 bytes for each parameter.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.train.megatron.megatron_settings import check_trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.train.megatron.trainer import MegatronTrainer


def checkpoint_in(source: Path) -> Path | None:
    """The trainer's checkpoint that a folder is or holds, as a checkpoint of a run does in trainer/; None: neither."""
    return next((folder for folder in (source, source / "trainer") if (folder / ".metadata").is_file()), None)


def write_checkpoint(model: Path, target: Path, dtype: str) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint before the first step into the new folder `target`.

    Raises:
        UsageError: the model cannot be trained, or the folder is not complete.
    """
    with _trainer(model, dtype) as trainer:
        trainer.save(target)


def write_hugging_face(checkpoint: Path, model: Path, target: Path, dtype: str) -> None:
    """Write the weights of a checkpoint into the new Hugging Face folder `target`, with the other files of the folder `model`.

    Raises:
        UsageError: `model` cannot be trained.
        StoreError: the checkpoint is of another model, or not complete.
    """
    with _trainer(model, dtype) as trainer:
        trainer.load(checkpoint)
        trainer.export_weights(target)


@contextmanager
def _trainer(model: Path, dtype: str) -> Iterator[MegatronTrainer]:
    from agentrl.train.megatron.trainer import MegatronTrainer

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"weights can be converted in float32 or bfloat16; found {dtype!r}: give --dtype")
    check_trainer(model, {}, 1, 0)
    with tempfile.TemporaryDirectory() as folder, MegatronTrainer(model, run_dir=Path(folder), dtype=dtype) as trainer:
        yield trainer
