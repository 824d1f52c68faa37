"""Converts weights between Hugging Face folders and the trainer's distributed checkpoints, by a trainer of one rank. No torch here.

The rank holds weights, gradients and the optimizer's copy: about 16 bytes for each parameter.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config import LoraSettings
from agentrl.core.atomic_write import new_folder
from agentrl.errors import ConfigError
from agentrl.train.megatron.checkpoint_model import read_adapters
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

    Adapters are merged into the weights, and are in the folder `adapter` of `target` as peft writes them.

    Raises:
        UsageError: `model` cannot be trained.
        StoreError: the checkpoint is of another model, or not complete.
    """
    adapters = read_adapters(checkpoint)
    with _trainer(model, dtype, _settings(adapters)) as trainer:
        trainer.load(checkpoint)
        with new_folder(target) as folder:  # so that the weights do not appear without the adapters
            folder.rmdir()
            trainer.export_weights(folder)
            if adapters is not None:
                trainer.export_adapter(folder / "adapter")


def _settings(adapters: dict[str, Any] | None) -> LoraSettings:
    """The settings of the adapters in a checkpoint."""
    if adapters is None:
        return LoraSettings()
    rank, alpha, targets = (adapters[name] for name in ("rank", "alpha", "targets"))
    return LoraSettings(lora_rank=rank, lora_alpha=alpha, lora_target_modules=tuple(targets))


@contextmanager
def _trainer(model: Path, dtype: str, lora: LoraSettings | None = None) -> Iterator[MegatronTrainer]:
    from agentrl.train.megatron.trainer import MegatronTrainer

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"weights can be converted in float32 or bfloat16; found {dtype!r}: give --dtype")
    check_trainer(model, {}, 1, 0)
    options: dict[str, Any] = {"dtype": dtype, "lora": lora}
    with tempfile.TemporaryDirectory() as folder, MegatronTrainer(model, run_dir=Path(folder), **options) as trainer:
        yield trainer
