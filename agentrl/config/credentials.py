"""Credentials in settings are kept out of config.toml: it holds references, and `secrets.toml` beside it, readable by its owner only, the values.

A credential is the user and the password of an address, a token in its query, or an argument whose name says so (`api_key`, `password`, …).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from agentrl.core.atomic_write import new_file
from agentrl.core.plain_files import read_plain_file
from agentrl.core.redaction import QUERY, USERINFO, is_secret_name, redact
from agentrl.errors import ConfigError

FILE = "secrets.toml"
_REFERENCE = re.compile(r"\$\{secret:([^}]+)\}")
_BARE_USERINFO = re.compile(r"^[^/@\s]+(?=@)")
"""in an address without http://"""
_ADDRESSES = ("rollout_external_engine_addrs",)
_TABLES = ("megatron", "sglang")
_CONTROL_TOKEN = re.compile(r"<.*>|\[.*\]")
"""`eos_token` and the like are not secrets"""
_HEADER = "# Credentials that config.toml refers to. Give the run folder to others without this file: they can view and replay it.\n"


def separate(settings: Mapping[str, Any], credentials: dict[str, Any]) -> dict[str, Any]:
    """Return settings with a reference in place of each credential.

    Args:
        settings: values by section and name.
        credentials: receives the credentials by the names of their references. A name that it holds keeps its value.
    """
    separated: dict[str, Any] = _separated(settings, (), credentials)
    return separated


def resolve(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return settings with the credentials of `file` in place of the references to them; others remain."""
    if not _unresolved(settings):
        return settings
    resolved: dict[str, Any] = _resolved(settings, read_credentials(file))
    return resolved


def require_resolved(settings: Mapping[str, Any]) -> None:
    """Refuse settings that refer to credentials that are not there.

    Raises:
        ConfigError: there are some.
    """
    if missing := _unresolved(settings):
        raise ConfigError(
            f"the settings refer to credentials that {FILE} of the run lacks: {', '.join(missing)}; restore the file, or give these settings again"
        )


def read_credentials(file: Path) -> dict[str, Any]:
    """Return the credentials in a file; {} if it does not exist or cannot be read, as by anyone but its owner.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return tomllib.loads(read_plain_file(file).decode())
    except OSError:
        return {}
    except ValueError as e:  # also not UTF-8
        raise ConfigError(f"{file}: not TOML: {e}; restore it, or remove it and give the credentials again") from e


def write_credentials(file: Path, credentials: Mapping[str, Any]) -> None:
    """Write credentials into a file that only its owner can read, whatever the umask."""
    with new_file(file) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as f:
            f.write(_HEADER + tomli_w.dumps(dict(credentials)))


def _separated(value: Any, path: tuple[str, ...], credentials: dict[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {
            _separated(key, path, credentials): _separated(v, (*path, key), credentials) for key, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_separated(v, path, credentials) for v in value]
    if _is_secret(path, value):
        return _reference(path, value, credentials)
    if not isinstance(value, str):
        return value
    value = USERINFO.sub(lambda m: _reference(path, m[0], credentials), value)
    if path and path[-1] in _ADDRESSES and "://" not in value:
        value = _BARE_USERINFO.sub(lambda m: _reference(path, m[0], credentials), value)
    return QUERY.sub(lambda m: m[1] + _reference(path, m[2], credentials), value) if "://" in value else value


def _is_secret(path: tuple[str, ...], value: Any) -> bool:
    """Whether the argument at `path` is secret as a whole. Settings of agentrl itself are not: `input_key` is a column."""
    is_argument = len(path) > (1 if path and path[0] in _TABLES else 2)
    if not is_argument or not is_secret_name(path[-1]) or isinstance(value, bool):
        return False
    if isinstance(value, int):
        return "token" not in path[-1].lower()
    return isinstance(value, str) and bool(value) and not _CONTROL_TOKEN.fullmatch(value) and not _whole(value)


def _reference(path: tuple[str, ...], value: Any, credentials: dict[str, Any]) -> str:
    """The text that refers to a credential, which is added under the first name that is free or has this value."""
    if _REFERENCE.search(str(value)):
        return str(value)
    base = re.sub(r"[^\w.-]+", "-", redact(".".join(path)))
    name, number = base, 1
    while credentials.setdefault(name, value) != value:
        number += 1
        name = f"{base}-{number}"
    return f"${{secret:{name}}}"


def _resolved(value: Any, credentials: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {_resolved(k, credentials): _resolved(v, credentials) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolved(v, credentials) for v in value]
    if not isinstance(value, str):
        return value
    if (name := _whole(value)) is not None:
        return credentials.get(name, value)
    return _REFERENCE.sub(lambda m: str(credentials.get(m[1], m[0])), value)


def _whole(value: str) -> str | None:
    """The name of the credential that a value refers to, and nothing else."""
    match = _REFERENCE.fullmatch(value)
    return match[1] if match else None


def _unresolved(value: Any) -> list[str]:
    """The names of the credentials that settings refer to."""
    if isinstance(value, Mapping):
        return [name for item in value.items() for part in item for name in _unresolved(part)]
    if isinstance(value, (list, tuple)):
        return [name for part in value for name in _unresolved(part)]
    return _REFERENCE.findall(value) if isinstance(value, str) else []
