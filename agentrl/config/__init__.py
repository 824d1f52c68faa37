"""Settings of a run, as frozen pydantic dataclasses with one section each.

Settings come in layers, of which later ones win: the defaults, the environment's own TOML (`envs/NAME.toml` beside its file),
`--config FILE.toml`, and flags. Unknown keys are errors with a suggestion.

Field names are unique over all sections, so that each is also a flag: `rollout_batch_size` is `--rollout-batch-size`. Megatron's settings are
in the table [megatron] under Megatron's names, SGLang's in [sglang].
"""

from agentrl.config.load import Layer, build_config, read_toml
from agentrl.config.settings import (
    FIELDS,
    SECTIONS,
    Config,
    EngineSettings,
    EnvSettings,
    GatewaySettings,
    LoraSettings,
    RunSettings,
    TrainSettings,
)

__all__ = [
    "FIELDS",
    "SECTIONS",
    "Config",
    "EngineSettings",
    "EnvSettings",
    "GatewaySettings",
    "Layer",
    "LoraSettings",
    "RunSettings",
    "TrainSettings",
    "build_config",
    "read_toml",
]
