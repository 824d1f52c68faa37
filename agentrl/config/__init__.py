"""Settings: frozen dataclasses with a docstring per field. Layers, the later ones winning: defaults, the environment's own TOML
(`envs/NAME.toml` beside its file), `--config FILE.toml`, flags. Unknown keys are errors with a suggestion.

Field names are unique over all sections, so that each is also a flag: `rollout_batch_size` is `--rollout-batch-size`. Megatron's own
settings live in the table `[megatron]` under Megatron's names, SGLang's in `[sglang]`.
"""

from agentrl.config.load import Layer, build_config, read_toml
from agentrl.config.settings import (
    FIELDS,
    SECTIONS,
    Config,
    DataSettings,
    EngineSettings,
    EnvSettings,
    EvalSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    SftSettings,
    TrainSettings,
)

__all__ = [
    "FIELDS",
    "SECTIONS",
    "Config",
    "DataSettings",
    "EngineSettings",
    "EnvSettings",
    "EvalSettings",
    "Layer",
    "ModelSettings",
    "RolloutSettings",
    "RunSettings",
    "SftSettings",
    "TrainSettings",
    "build_config",
    "read_toml",
]
