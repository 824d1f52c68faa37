"""Every setting: its type, bound, default and help text, each in one place; one file per group of sections.

The text under a field is its help: the first paragraph is what `--help` prints, the rest what `agentrl help FLAG` adds. A default that is
None or empty is explained in the text as "(default: …)". A string in `Annotated` is the name of the value in the help, such as PATH.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from agentrl.config.credentials import require_resolved, separate
from agentrl.config.settings.base import STRICT
from agentrl.config.settings.env import DataSettings, EnvSettings, GatewaySettings
from agentrl.config.settings.evaluation import EvalSettings
from agentrl.config.settings.rollout import EngineSettings, RolloutSettings, ScheduleSettings
from agentrl.config.settings.run import ModelSettings, RunSettings
from agentrl.config.settings.train import ESTIMATOR_NAMES, LoraSettings, SftSettings, TrainSettings
from agentrl.core.name_syntax import split_slice
from agentrl.core.redaction import redact

__all__ = [
    "ESTIMATOR_NAMES",
    "FIELDS",
    "SECTIONS",
    "TABLES",
    "Config",
    "DataSettings",
    "EngineSettings",
    "EnvSettings",
    "EvalSettings",
    "GatewaySettings",
    "LoraSettings",
    "ModelSettings",
    "RolloutSettings",
    "RunSettings",
    "ScheduleSettings",
    "SftSettings",
    "TrainSettings",
    "field_infos",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """All settings of a run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    env: EnvSettings = EnvSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    train: TrainSettings = TrainSettings()
    lora: LoraSettings = LoraSettings()
    eval: EvalSettings = EvalSettings()
    sft: SftSettings = SftSettings()
    megatron: dict[str, Any] = field(default_factory=dict)
    """fields of megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig"""
    sglang: dict[str, Any] = field(default_factory=dict)
    """flags of SGLang's server by name; on the command line `--sglang-NAME VALUE`"""

    @property
    def global_batch_size(self) -> int:
        """Episodes per optimizer step."""
        r = self.rollout
        return r.global_batch_size or r.rollout_batch_size * r.n_samples_per_prompt // r.num_steps_per_rollout

    @property
    def label(self) -> str:
        """What the run is called in names and titles: its environment, else the name of its data file, else 'run'."""
        return redact(self.env.env or "") or Path(split_slice(self.data.prompt_data or "run")[0]).name.partition(".")[0]

    def to_toml(self, defaults: Container[str] | None = None, credentials: dict[str, Any] | None = None) -> str:
        """The settings as TOML that `read_toml` reads back.

        Settings of None are left out where None is the default. What is None inside a table, for which TOML has no word, is listed under NONES.

        Args:
            defaults: names of the settings that are written although they are at their defaults; None: all of them. Sections in which nothing
                is written are left out then.
            credentials: receives the credentials, in whose place the text has references; see `agentrl.config.credentials`.
        """
        values = separate(_plain(self, defaults), {} if credentials is None else credentials)
        if defaults is not None:
            values = {k: v for k, v in values.items() if v or k in TABLES}
        nones = list(_nones(self))
        return tomli_w.dumps({NONES: nones} | values if nones else values)

    def require_credentials(self) -> None:
        """Refuse references to credentials that are not there, as in a run folder that was received without them.

        Raises:
            ConfigError: there are some.
        """
        require_resolved(_plain(self))


SECTIONS: dict[str, type] = {f.name: type(f.default) for f in fields(Config) if is_dataclass(f.default)}
"""Section name -> its dataclass."""

FIELDS: dict[str, str] = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}
"""Field name -> its section."""

TABLES = ("megatron", "sglang")
"""Sections whose keys are another program's settings."""

NONES = "none"
"""The key of the places inside tables where a value is None: the setting's name, then the keys and indexes below it."""


def field_infos(cls: type) -> dict[str, FieldInfo]:
    """Type, bounds, default and help text of each field of a section."""
    infos: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return infos


def _plain(value: Any, defaults: Container[str] | None = None) -> Any:
    if is_dataclass(value):
        values = {
            name: (getattr(value, name), info.get_default(call_default_factory=True))
            for name, info in field_infos(type(value)).items()
            if not info.exclude
        }
        return {
            name: "none" if v is None else _plain(v, defaults)
            for name, (v, default) in values.items()
            if (v is not None or default is not None)
            and (defaults is None or isinstance(value, Config) or name in defaults or v != default)
        }
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return value


def _nones(config: Config) -> Iterator[list[str | int]]:
    """The places of None inside the tables of a config."""
    for name, section in (*FIELDS.items(), *((table, None) for table in TABLES)):
        value = getattr(getattr(config, section), name) if section else getattr(config, name)
        if isinstance(value, Mapping):
            yield from _nones_in(value, name)


def _nones_in(value: Any, *place: str | int) -> Iterator[list[str | int]]:
    if value is None:
        yield list(place)
    elif isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _nones_in(inner, *place, key)
