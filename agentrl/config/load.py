"""Read settings from TOML files and merge layers of them into a `Config`."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.credentials import FILE, resolve, separate
from agentrl.config.describe import describe_bounds, describe_type, is_optional
from agentrl.config.rules import check, with_servers
from agentrl.config.settings import FIELDS, NONES, SECTIONS, TABLES, Config, field_infos
from agentrl.core.redaction import remember
from agentrl.errors import ConfigError, suggest

Layer = dict[str, Any]
"""Raw values by field name, without sections; the tables 'megatron' and 'sglang' are mappings."""

_adapter = lru_cache(TypeAdapter)


def read_toml(path: Path) -> Layer:
    """Read a TOML file as one layer. The credentials to which a run's config.toml refers come from the file beside it.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an unknown section or key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from e
    except ValueError as e:  # an integer of thousands of digits
        raise ConfigError(f"{path}: not a settings file: {e}") from e
    except RecursionError as e:
        raise ConfigError(f"{path}: arrays or tables are nested too deep") from e
    layer: Layer = {}
    nones = data.pop(NONES, [])
    for section, body in resolve(data, path.with_name(FILE)).items():
        if section in FIELDS and section not in SECTIONS:
            raise ConfigError(f"{path}: {section!r} is outside any section; it belongs in [{FIELDS[section]}]")
        if section not in (*SECTIONS, *TABLES):
            raise ConfigError(f"{path}: unknown section [{section}]{suggest(section, [*SECTIONS, *TABLES])}")
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {section!r} is a section; write [{section}] and its keys below it")
        if section in TABLES:
            layer[section] = body
            continue
        for key, value in body.items():
            if FIELDS.get(key) != section:
                advice = (
                    f"; it belongs in [{FIELDS[key]}]"
                    if key in FIELDS
                    else suggest(key, [k for k, s in FIELDS.items() if s == section])
                )
                raise ConfigError(f"{path}: unknown key {key!r} in [{section}]{advice}")
            layer[key] = value
    _set_nones(layer, nones, path)
    return layer


def _set_nones(layer: Layer, places: Any, path: Path) -> None:
    """Set what a file lists under NONES.

    Raises:
        ConfigError: an entry is not a place inside a table of the file.
    """
    for place in places if isinstance(places, list) else [places]:
        inner: Any = layer
        last, known = None, False
        try:
            *outer, last = place
            for key in outer:
                inner = inner[key]
            known = outer and isinstance(inner, dict) and isinstance(last, str) and last not in inner
        except (TypeError, ValueError, LookupError):
            pass
        if not known:
            raise ConfigError(
                f'{path}: {NONES!r} must list places inside tables of this file where a value is None, such as ["env_args", "limit"]; '
                f"found {place!r:.80}"
            )
        inner[last] = None


def build_config(*layers: Layer, base: Layer | None = None) -> Config:
    """Merge layers into a `Config`: later ones win, and tables merge by key. Text is converted to the type of its field.

    `base` is the lowest layer: what a run recorded, or what an environment recommends. It may hold settings that have no effect.
    The text 'none' means None where a setting may be None, because TOML and flags have no other word for it.

    Raises:
        ConfigError: An unknown name, a value of the wrong type or out of bounds, or settings that contradict each other.
    """
    merged: Layer = {}
    for layer in (base or {}, *layers):
        for key, value in layer.items():
            if key not in FIELDS and key not in TABLES:
                raise ConfigError(f"unknown setting {key!r}{suggest(key, FIELDS)}")
            before: Any = merged.get(key)
            merged[key] = {**before, **value} if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    _remember_credentials(merged)
    if problems := value_problems(merged):
        raise ConfigError.of_all(problems)
    sections = {
        name: _adapter(cls).validate_python(_values(cls, merged), strict=False) for name, cls in SECTIONS.items()
    }
    config = Config(**sections, megatron=dict(merged.get("megatron", {})), sglang=dict(merged.get("sglang", {})))
    if "engine" not in merged:
        config = with_servers(config)
    check(config, {key for layer in layers for key in layer})
    return config


def _remember_credentials(layer: Layer) -> None:
    """Mask the credentials of settings in every message from now on."""
    credentials: dict[str, Any] = {}
    for key, value in layer.items():
        separate({key: value} if key in TABLES else {FIELDS[key]: {key: value}}, credentials)
    for credential in credentials.values():
        remember(credential)


_TOML_TYPES = (str, bool, int, float, datetime.date, datetime.time)


def value_problems(layer: Layer) -> list[str]:
    """One sentence for each setting whose value has the wrong type or is out of bounds."""
    problems: dict[tuple[type, Any], str] = {}
    for cls in SECTIONS.values():
        try:
            _adapter(cls).validate_python(_values(cls, layer), strict=False)
        except ValidationError as e:
            for error in reversed(e.errors()):
                problems[cls, error["loc"][0]] = _sentence(cls, error)
    odd = [
        f"--{name.replace('_', '-')} must be Unicode text without NUL, found {value!a:.60}"
        for name, value in layer.items()
        if not _is_text(value)
    ]
    unwritable = [
        f"--{name.replace('_', '-')} must hold values that config.toml can hold (text, numbers, true or false, lists and tables of them), "
        f"found {value!a:.60}"
        for name, value in layer.items()
        if isinstance(value, Mapping) and not all(map(_is_writable, value.values()))
    ]
    return [*problems.values(), *odd, *unwritable]


def _is_writable(value: Any, inside_list: bool = False) -> bool:
    """Whether TOML can hold a value. A key of a table whose value is None is left out; a list cannot hold None."""
    if isinstance(value, Mapping):
        return all(map(_is_writable, value.values()))
    if isinstance(value, (list, tuple)):
        return all(_is_writable(v, inside_list=True) for v in value)
    return isinstance(value, _TOML_TYPES) or (value is None and not inside_list)


def _is_text(value: Any) -> bool:
    """False if a text in it cannot be written as UTF-8, as config.toml is (an argument in another encoding), or has a NUL, which no path may have."""
    if isinstance(value, Mapping):
        return all(map(_is_text, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_text, value))
    return not isinstance(value, str) or not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


def _values(cls: type, layer: Layer) -> Layer:
    """The values of a section's fields."""
    return {
        name: None if layer[name] == "none" and is_optional(info.annotation) else layer[name]
        for name, info in field_infos(cls).items()
        if name in layer
    }


def _sentence(cls: type, error: ErrorDetails) -> str:
    name, *inner = error["loc"]
    info = field_infos(cls)[str(name)]
    found = error["input"]
    reason: Sequence[str] = ()
    if error["type"] == "value_error":
        must, *reason = error["ctx"]["error"].args
    elif error["type"] == "finite_number":
        must = "must be a finite number"
    elif error["type"].startswith(("greater", "less")):
        must = f"must be {describe_bounds(info)}"
    else:
        must = f"must be {'a list of text' if inner else describe_type(info.annotation)}"
        found = repr(found)
    return ": ".join([f"--{str(name).replace('_', '-')} {must}, found {found}", *reason])
