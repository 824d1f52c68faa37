"""Names of environments, rewards and other objects that are chosen on the command line.

A name is a registered one (by `@register_env("x")`, by an entry point of the group `agentrl.envs`, or built in), or
`package.module:Object`, or `path/to/file.py[:Object]`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentrl.core.name_syntax import split_object
from agentrl.errors import ConfigError, UnknownNameError, UsageError, place, suggest

T = TypeVar("T")


class Registry:
    """The objects of one kind, by name."""

    def __init__(
        self, kind: str, builtin: Mapping[str, str], default: Callable[[ModuleType], Any] | None = None
    ) -> None:
        """`builtin` maps names to 'module:Object', imported on demand. `default` chooses the object of a module named without one."""
        self.kind = kind
        self._known: dict[str, Any] = dict(builtin)
        self._default = default

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name`."""

        def add(obj: T) -> T:
            self._known[name] = obj
            return obj

        return add

    def names(self) -> list[str]:
        """Return all registered names, including entry points."""
        return sorted({*self._known, *(e.name for e in entry_points(group=f"agentrl.{self.kind}s"))})

    def resolve(self, name: str) -> Any:
        """Return the object with a name.

        Raises:
            UnknownNameError: no object has that name.
            ConfigError: the module or file cannot be imported or lacks the object.
        """
        if name in self._known:
            known = self._known[name]
            return self._import(known, name) if isinstance(known, str) else known
        for entry in entry_points(group=f"agentrl.{self.kind}s"):
            if entry.name == name:
                return self._load(entry)
        if ":" in name or name.endswith(".py"):
            return self._import(name, name)
        raise UnknownNameError.of(self.kind, name, self.names())

    def _load(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except (ImportError, AttributeError) as e:
            raise ConfigError(f"{self.kind} {entry.name!r}: its entry point {entry.value} cannot be loaded: {e}") from e

    def _import(self, target: str, asked: str) -> Any:
        where, attribute = split_object(target)
        if not where.endswith(".py") and not all(map(str.isidentifier, where.split("."))):
            raise ConfigError(
                f"{self.kind} {asked!r}: expected package.module:Object or file.py:Object, "
                f"found {where!r} before the ':'"
            )
        try:
            module = load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        except (ImportError, SyntaxError, OSError) as e:
            raise ConfigError(f"{self.kind} {asked!r}: cannot import {where}: {type(e).__name__}: {e}") from e
        except UsageError:
            raise
        except (Exception, SystemExit) as e:  # user code may raise anything
            raise ConfigError(f"{self.kind} {asked!r}: cannot import {where}: {raised(e, where)}") from e
        if not attribute:
            chosen = self._default(module) if self._default else None
            if chosen is None:
                raise ConfigError(f"{self.kind} {asked!r}: add the name of the object, as in {where}:Name")
            return chosen
        if not hasattr(module, attribute):
            raise ConfigError(
                f"{self.kind} {asked!r}: {where} has no {attribute!r}{suggest(attribute, public_names(module))}"
            )
        return getattr(module, attribute)


def load_file(path: Path) -> ModuleType:
    """Import a Python file by path. It is imported once per process, so that its classes keep one identity."""
    path = path.resolve()
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    name = f"agentrl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def raised(error: BaseException, file: str) -> str:
    """Describe an exception of user code and its place: the innermost line in `file`, or the innermost line if none is in it."""
    where, line = place(error, str(Path(file).resolve()).__eq__)
    return f"{where}, line {line}: {type(error).__name__}: {error}"


def public_names(module: ModuleType) -> list[str]:
    """Return the names of the public classes and functions of a module, for suggestions."""
    members = vars(module).items()
    return [name for name, value in members if name[0] != "_" and (inspect.isclass(value) or inspect.isfunction(value))]
