"""Layers of settings, read and put over each other."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.config.rules import check
from agentrl.config.settings import FIELDS, SECTIONS, TABLES, Config
from agentrl.errors import ConfigError, suggest

Layer = dict[str, Any]
"""flat field names (and 'megatron': {...}) with raw values"""


def read_toml(path: Path) -> Layer:
    """A TOML file as a flat layer.

    Raises:
        ConfigError: no such file, not TOML, an unknown section or key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from e
    flat: Layer = {}
    for section, body in data.items():
        if section in FIELDS and section not in SECTIONS:
            raise ConfigError(f"{path}: {section!r} stands in no section; it belongs in [{FIELDS[section]}]")
        if section not in (*SECTIONS, *TABLES):
            raise ConfigError(f"{path}: unknown section [{section}]{suggest(section, [*SECTIONS, *TABLES])}")
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {section!r} is a section; write [{section}] and its keys below it")
        if section in TABLES:
            flat[section] = body
            continue
        for key, value in body.items():
            if FIELDS.get(key) != section:
                where = (
                    f"; it belongs in [{FIELDS[key]}]"
                    if key in FIELDS
                    else suggest(key, [k for k, s in FIELDS.items() if s == section])
                )
                raise ConfigError(f"{path}: unknown key {key!r} in [{section}]{where}")
            flat[key] = value
    return flat


def build_config(*layers: Layer) -> Config:
    """Merge layers (later ones win; env_args, template_args and megatron merge by key), convert, check.

    'none' stands for None where a setting may be None (TOML and flags have no other word for it).

    Raises:
        ConfigError: an unknown name, a value of the wrong type, or settings that contradict each other.
    """
    flat: Layer = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in FIELDS and key not in TABLES:
                raise ConfigError(f"unknown setting {key!r}{suggest(key, FIELDS)}")
            before: Any = flat.get(key)
            flat[key] = {**before, **value} if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    sections = {
        name: _section(cls, {f.name: flat[f.name] for f in fields(cls) if f.name in flat})
        for name, cls in SECTIONS.items()
    }
    config = Config(**sections, megatron=dict(flat.get("megatron", {})), sglang=dict(flat.get("sglang", {})))
    check(config)
    return config


def _section(cls: type, values: Layer) -> Any:
    optional = {f.name for f in fields(cls) if "None" in str(f.type)}
    values = {k: None if v == "none" and k in optional else v for k, v in values.items()}
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as e:
        first = e.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else cls.__name__
        raise ConfigError(
            f"--{name.replace('_', '-')}: {first['msg'][0].lower()}{first['msg'][1:]}, found {first['input']!r}"
        ) from e


_adapter = lru_cache(TypeAdapter)
