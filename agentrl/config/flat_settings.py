"""`Settings`: every setting of a run in one class, for runs that are started from Python."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import tomli_w

from agentrl.config.describe import ALIASES, default_text, describe_bounds, describe_type
from agentrl.config.load import value_problems
from agentrl.config.settings import FIELDS, SECTIONS, TABLES, field_infos
from agentrl.config.settings.env import DataSettings, EnvSettings, GatewaySettings
from agentrl.config.settings.evaluation import EvalSettings
from agentrl.config.settings.rollout import EngineSettings, RolloutSettings, ScheduleSettings
from agentrl.config.settings.run import ModelSettings, RunSettings
from agentrl.config.settings.train import LoraSettings, SftSettings, TrainSettings
from agentrl.env import Env
from agentrl.errors import ConfigError, suggest
from agentrl.reward import Reward

_Reward = str | Reward | Callable[..., Any]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Settings(
    RunSettings,
    ModelSettings,
    EnvSettings,
    DataSettings,
    RolloutSettings,
    ScheduleSettings,
    EngineSettings,
    GatewaySettings,
    TrainSettings,
    LoraSettings,
    EvalSettings,
    SftSettings,
):
    """Settings of a run that is started from Python. Each is a flag of the command line, with the same name and meaning.

    What is not given comes from the environment's recommended settings and then from the defaults, as on the command line. `env` and `reward`
    also take Python objects. Paths are text or `pathlib.Path`.

    Raises:
        ConfigError: a setting is unknown, or its value has the wrong type or is out of bounds; the message names all of them.

    Example:
        >>> settings = Settings(env="search_r1", model="search_r1_3m", num_rollout=3, lr=1e-4)
        >>> settings
        Settings(env='search_r1', hf_checkpoint='search_r1_3m', num_rollout=3, lr=0.0001)
    """

    env: str | type[Env] | Callable[[], Env] | None = None  # type: ignore[assignment]  # wider than a flag's
    """environment: an `Env` class, a function that makes an instance for each episode, or a name as of --env"""
    reward: _Reward | Sequence[_Reward] = ()  # type: ignore[assignment]
    """rewards: functions, `@reward` objects or names as of --reward (default: the environment's)"""
    model: str | os.PathLike[str] | None = None
    """another name of `hf_checkpoint`, as --model is"""
    megatron: dict[str, Any] = field(default_factory=dict)
    """settings of Megatron by the names of its fields"""
    sglang: dict[str, Any] = field(default_factory=dict)
    """flags of SGLang's server by name"""

    if not TYPE_CHECKING:  # type checkers see one parameter for each setting

        def __init__(self, **given: Any) -> None:
            """See the class."""
            given = {name: _as_text(value) for name, value in given.items()}
            if problems := list(_problems(given)):
                raise ConfigError.of_all(problems)
            named = {ALIASES.get(name, name): value for name, value in given.items()}
            for f in fields(self):
                default = f.default if f.default_factory is MISSING else f.default_factory()
                object.__setattr__(self, f.name, named.get(ALIASES.get(f.name, f.name), default))
            object.__setattr__(self, "_given", named)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were given, by name."""
        return dict(self.__dict__["_given"])

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


_OBJECTS = ("env", "reward")
"""settings that may be Python objects; what starts the run checks them"""


def _as_text(value: Any) -> Any:
    """The value with its paths as text."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_text, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each setting that cannot be taken."""
    known = {*FIELDS, *TABLES, *ALIASES}
    for name, value in given.items():
        if name not in known:
            yield f"unknown setting {name!r}{suggest(name, known)}"
        elif ALIASES.get(name, name) != name and ALIASES[name] in given:
            yield f"{name} and {ALIASES[name]} are one setting; give one of them"
        elif isinstance(value, Mapping) and (key := unrecordable(value)) is not None:
            yield (
                f"{name}: the value of {key!r} is of a type that config.toml cannot hold; for an argument of an environment, give a function that "
                "makes the instance, as in env=lambda: MyEnv(argument)"
            )
    yield from value_problems({ALIASES.get(n, n): v for n, v in given.items() if n in known and n not in _OBJECTS})


def unrecordable(table: Mapping[Any, Any]) -> Any:
    """The first key whose value is not a TOML value; None if there is none."""
    for key, value in table.items():
        try:
            tomli_w.dumps({str(key): {"value": value} if value is not None else {}})
        except TypeError:
            return key
    return None


def _explained() -> str:
    """The help of every setting, by section."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += ["", f"[{section}] {inspect.getdoc(cls)}", ""]
        for name, info in field_infos(cls).items():
            summary, *further = (info.description or "").split("\n\n")
            default = "" if "(default: " in summary else f"default: {default_text(info)}"
            facts = filter(None, [describe_type(info.annotation), describe_bounds(info), default])
            text = " ".join(". ".join([summary, *further]).split())
            lines.append(f"- `{name}` ({', '.join(facts)}): {text}")
    return "\n".join(lines)


Settings.__doc__ = f"{inspect.cleandoc(Settings.__doc__ or '')}\n{_explained()}"
Settings.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for completion in a notebook
    [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None if f.default is MISSING else f.default)
        for f in fields(Settings)
    ]
)
