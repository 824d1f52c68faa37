"""The adapters that a run trains (`--lora-rank`): what they are, and whether a checkpoint holds them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.run.players import INITIAL

if TYPE_CHECKING:
    from agentrl.train.megatron.lora import Lora


def trained_adapters(config: Config, folder: Path) -> Lora | None:
    """The adapters of the model in `folder`; None: all weights are trained.

    Raises:
        UsageError: the model cannot have them, they are of another base, or a setting contradicts them.
    """
    from agentrl.train.megatron.lora import resolve
    from agentrl.train.megatron.model_config import read_model_config

    if not config.lora.used:
        return None
    players = (*config.env.players.values(), *config.eval.eval_players.values())
    if config.lora.lora_adapter_path and INITIAL in players:
        raise ConfigError(
            "--player initial is the base, without the adapters of --lora-adapter-path; give the folder of a model into which they are merged"
        )
    tree_packing = config.train.tree_packing and not config.train.true_on_policy_mode
    return resolve(config.lora, folder, read_model_config(folder), config.megatron, tree_packing=tree_packing)


def describe_adapters(config: Config, folder: Path) -> str | None:
    """What is trained, in one line; None: all weights."""
    from agentrl.train.megatron.lora import describe
    from agentrl.train.megatron.model_config import read_model_config

    lora = trained_adapters(config, folder)
    return None if lora is None else describe(folder, read_model_config(folder), lora)


def require_adapters(config: Config, folder: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint whose adapters are not those that the settings describe, or of another base.

    Raises:
        UsageError, StoreError: it is.
    """
    from agentrl.train.megatron.checkpoint_model import require_model
    from agentrl.train.megatron.model_config import read_model_config

    if config.lora.used:
        require_model(checkpoint, read_model_config(folder), trained_adapters(config, folder))
