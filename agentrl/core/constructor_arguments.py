"""The check of constructor arguments that are given on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError, suggest


def check_arguments(what: str, cls: type, args: Mapping[str, Any], flag: str) -> None:
    """Refuse arguments that the constructor of `cls` does not have, and the lack of those that it needs.

    Args:
        what: the class in messages, such as 'environment Browse'.
        cls: the class.
        args: by name.
        flag: gives one of them.

    Raises:
        ConfigError: an argument is missing or unknown.
    """
    parameters = inspect.signature(cls).parameters
    for name, p in parameters.items():
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in args:
            raise ConfigError(f"{what} needs an argument {name!r}; give {flag} {name}=VALUE")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in args:
        if name not in parameters:
            raise ConfigError(f"{what} takes no argument {name!r}{suggest(name, parameters)}")
