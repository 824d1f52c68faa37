"""The configuration of a model, read from its Hugging Face config.json: what megatron-core must build. No torch, no transformers.

The families are in families/.
"""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.train.megatron.families import read_family
from agentrl.train.megatron.families.base import HuggingFaceConfig, LatentAttention, ModelConfig, Rope

__all__ = ["LatentAttention", "ModelConfig", "Rope", "read_model_config"]


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises:
        ConfigError: there is no such file, or the model's family or a feature is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return read_family(HuggingFaceConfig(path, json.loads(path.read_text())))
