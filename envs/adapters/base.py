"""What the adapters share: a class for each target (`--env PREFIX:TARGET`), the package it needs, and tasks that are seeds."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Self, cast

import orjson

from agentrl.env import Env
from agentrl.errors import ConfigError
from agentrl.types import Task

_TEST_SEEDS = 1_000_000_000
"""seeds of the split 'test' begin here, so that no task is in both splits"""


class Adapted(Env):
    """An environment of another package. `--env PREFIX:TARGET` names it; `of` makes its class."""

    prefix: ClassVar[str] = ""
    """the part of the name before the colon"""
    extra: ClassVar[str] = ""
    """the extra of agentrl that installs the package; empty: agentrl itself requires it"""
    example: ClassVar[str] = ""
    """a target, for the message about a missing one"""
    target: ClassVar[str] = ""
    """the part of the name after the colon"""

    @classmethod
    def of(cls, target: str) -> type[Self]:
        """The environment's class for a target; the same class for the same target.

        Raises:
            ConfigError: the target is missing or unknown, or the package is not installed.
        """
        if not target:
            raise ConfigError(
                f"--env {cls.prefix}: names nothing; write, for example, --env {cls.prefix}:{cls.example}"
            )
        made: type[Self] = _class_of(cast(Hashable, cls), target)
        return made

    @classmethod
    def attributes(cls, target: str) -> dict[str, Any]:
        """Class attributes for a target, such as `__signature__`, the arguments that it takes.

        Raises:
            ConfigError: there is no such target.
        """
        return {}

    @classmethod
    def package(cls, module: str) -> Any:
        """Import a module of the package.

        Raises:
            ConfigError: it is not installed; the message has the command that installs it.
        """
        try:
            return importlib.import_module(module)
        except ImportError as e:
            raise ConfigError(
                f"--env {cls.prefix}:… needs the package {module.partition('.')[0]} ({e}); "
                f"install it with: pip install 'agentrl[{cls.extra}]'"
            ) from e


@cache
def _class_of(cls: Any, target: str) -> Any:
    body = {"target": target, "name": f"{cls.prefix}:{target}", "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**body, **cls.attributes(target)})


def seed_tasks(prompt: str, split: str, size: int) -> Iterator[Task]:
    """Tasks that differ in their seed (`metadata["seed"]`); those of the two splits have no seed in common.

    Raises:
        ConfigError: there is no such split.
    """
    first = {"train": 0, "test": _TEST_SEEDS}.get(split)
    if first is None:
        raise ConfigError(f"there is no split {split!r}; there are 'train' and 'test'")
    for number in range(size):
        yield Task(f"{split}-{number}", prompt, metadata={"seed": first + number})


def arguments_key(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON, equal for equal ones: a key for what is loaded once for them."""
    return orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()


def part_of(split: str, count: int, test_size: int, size: int) -> range:
    """The places of a split's tasks in data without splits: the first `test_size`, at most half of `count`, are 'test', the next `size` 'train'.

    Raises:
        ConfigError: there is no such split.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"there is no split {split!r}; there are 'train' and 'test'")
    first = min(test_size, count // 2)
    return range(first) if split == "test" else range(first, first + size)


def seed_of(task: Task, group_seed: int) -> int:
    """The seed of a task's instance: the task's own, or that of the group, of 31 bits."""
    return int(task.metadata.get("seed", group_seed)) % (1 << 31)
