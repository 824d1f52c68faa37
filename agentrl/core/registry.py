"""Names of environments, rewards and other objects that are chosen on the command line.

A name is a registered one (by `@register_env("x")`, by an entry point of the group `agentrl.envs`, or built in), or
`package.module:Object`, or `path/to/file.py[:Object]`. Modules are found in the working directory too, and a file imports the modules beside it,
as `python file.py` would.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentrl.core.name_syntax import split_object
from agentrl.errors import ConfigError, UnknownNameError, UsageError, place, suggest

T = TypeVar("T")
logger = logging.getLogger(__name__)
USER_MODULE = "agentrl_user_"
"""how the names of modules begin that were imported by path"""
GIVEN = "python-object:"
"""how the names of objects begin that a Python program gave and that no module has, such as a class defined in a notebook"""


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

    def give(self, obj: Any, label: str) -> str:
        """Return a name for an object: that by which any process can import it, or `python-object:LABEL`, which only this one knows."""
        name = importable_name(obj) or f"{GIVEN}{label}"
        self._known[name] = obj
        return name

    def names(self) -> list[str]:
        """Return all registered names, including entry points."""
        return sorted(
            {
                *(n for n in self._known if not was_object(n)),
                *(e.name for e in entry_points(group=f"agentrl.{self.kind}s")),
            }
        )

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
        if was_object(name):
            label = name.removeprefix(GIVEN)
            raise ConfigError(
                f"{self.kind} {name!r} was given as a Python object that no file or module has; save it in a file and give "
                f"--{self.kind} FILE.py:{label}, or give the object again in Python: agentrl.Settings({self.kind}={label})"
            )
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
            module = load_file(Path(where)) if where.endswith(".py") else import_module(where)
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


def was_object(name: str) -> bool:
    """Whether a name stands for an object that only the program that gave it has."""
    return name.startswith(GIVEN)


def importable_name(obj: Any) -> str | None:
    """Return the name by which another process can import a class, a function or a reward: `file.py:Object` or `package.module:Object`.

    None: it is defined inside a function, in a notebook or on the command line of Python.
    """
    defined = obj if hasattr(obj, "__qualname__") else getattr(obj, "fn", obj)
    module = sys.modules.get(getattr(defined, "__module__", None) or "")
    attribute = getattr(defined, "__qualname__", "")
    if module is None or not attribute.isidentifier() or getattr(module, attribute, None) is not obj:
        return None
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None and "." in spec.name:
        return f"{spec.name}:{attribute}"
    return f"{Path(file).resolve()}:{attribute}" if file and file.endswith(".py") else None


_being_imported: list[Path] = []
"""files that `load_file` is importing"""


def require_not_importing() -> None:
    """Refuse to start a job from a file that is imported for the names in it.

    Raises:
        ConfigError: a file is being imported.
    """
    if _being_imported:
        raise ConfigError(
            f'{_being_imported[-1]} starts a run when it is imported; put that under `if __name__ == "__main__":`'
        )


def load_file(path: Path) -> ModuleType:
    """Import a Python file by path. It is imported once per process, so that its classes keep one identity."""
    path = path.resolve()
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    name = f"{USER_MODULE}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with _folder_first(path.parent):
        sys.modules[name] = module
        _being_imported.append(path)
        try:
            spec.loader.exec_module(module)
        finally:
            _being_imported.remove(path)
    return module


def import_module(name: str) -> ModuleType:
    """Import a module by its name, from the working directory too."""
    if (path := local_file(name)) is not None:
        return load_file(path)
    package, folder = name.partition(".")[0], Path.cwd()
    if package in sys.modules or not (folder / package).is_dir() or importlib.util.find_spec(package) is not None:
        return importlib.import_module(name)
    with _folder_first(folder):
        return importlib.import_module(name)


def local_file(name: str) -> Path | None:
    """Return the file of the module `name` in the working directory; None if there is none, or if another module has that name."""
    path = Path.cwd() / f"{name}.py"
    if not name.isidentifier() or name in sys.modules or not path.is_file():
        return None
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name)
    return path if spec is None or (spec.origin and Path(spec.origin).resolve() == path.resolve()) else None


_code_folders: set[Path] = set()
"""folders whose modules user code imports by their bare names"""


@contextmanager
def _folder_first(folder: Path) -> Iterator[None]:
    """Put a folder first on `sys.path` while its code is imported, and last afterwards, for imports inside functions.

    So modules beside user code come before installed ones of the same name for that code, and after them for everything else. Modules of the
    same name beside code in another folder are imported again. If the code raises, what it imported from the folder is forgotten.
    """
    _forget_namesakes(folder)
    _code_folders.add(folder)
    importlib.invalidate_caches()
    before, entry = set(sys.modules), str(folder)
    known = entry in sys.path
    sys.path.insert(0, entry)
    try:
        yield
    except BaseException:
        for name in set(sys.modules) - before:
            if name.startswith(USER_MODULE) or folder in _origins(sys.modules[name]):
                del sys.modules[name]
        raise
    finally:
        sys.path.remove(entry)
        if not known:
            sys.path.append(entry)
    for name in sorted(set(sys.modules) - before):
        if "." not in name and folder in _origins(sys.modules[name]):
            _warn_if_hidden(name, folder)


def _origins(module: ModuleType) -> set[Path]:
    """The folder from which a module was imported: that of its file, or of its package, and those above."""
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return {parent for place in places if isinstance(place, str) for parent in Path(place).parents}


def _forget_namesakes(folder: Path) -> None:
    """Let code in `folder` import its own modules, although code in another folder has imported others of the same names."""
    for name, module in list(sys.modules.items()):
        origins = _origins(module) if "." not in name else set()
        beside = (folder / f"{name}.py").is_file() or (folder / name).is_dir()
        if origins & _code_folders and folder not in origins and beside and not name.startswith(USER_MODULE):
            logger.warning(
                "%s: imports its own %s; %s, imported before, stays with the code that imported it, but imports inside functions get the new one",
                folder,
                name,
                getattr(module, "__file__", None) or name,
            )
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]


def _warn_if_hidden(name: str, folder: Path) -> None:
    elsewhere = [p for p in sys.path if Path(p or ".").resolve() != folder]
    hidden = importlib.machinery.PathFinder.find_spec(name, elsewhere)
    if hidden is not None and hidden.origin is not None:
        logger.warning(
            "%s: its module %s hides the installed %s; rename it if that is not meant", folder, name, hidden.origin
        )


def raised(error: BaseException, file: str) -> str:
    """Describe an exception of user code and its place: the innermost line in `file`, or the innermost line if none is in it."""
    where, line = place(error, str(Path(file).resolve()).__eq__)
    return f"{where}, line {line}: {type(error).__name__}: {error}"


def public_names(module: ModuleType) -> list[str]:
    """Return the names of the public classes and functions of a module, for suggestions."""
    members = vars(module).items()
    return [name for name, value in members if name[0] != "_" and (inspect.isclass(value) or inspect.isfunction(value))]
