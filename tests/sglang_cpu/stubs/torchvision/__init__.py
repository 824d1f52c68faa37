"""Stands in for torchvision, which SGLang imports for images and never calls for text: any submodule, class and function can be imported."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.0.0"
_MODES = ("BICUBIC", "BILINEAR", "BOX", "HAMMING", "LANCZOS", "NEAREST", "NEAREST_EXACT")


class _Anything:
    """Base of every class that is asked for; may be made and inherited from."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Module(types.ModuleType):
    """A module that has whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        whole = f"{self.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(name)
        if whole in sys.modules:
            return sys.modules[whole]
        if not name[0].isupper():
            return _missing(whole)
        found = type(name, (_Anything,), {mode: mode.lower() for mode in _MODES})
        setattr(self, name, found)
        return found


def _missing(whole: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{whole}: torchvision is not installed")

    return call


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes submodules on demand."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Every submodule of torchvision exists."""
        known = name.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module with everything in it."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Submodules have submodules."""
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
