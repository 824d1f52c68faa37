"""What the commands over recorded episodes share: the run's own settings with today's flags over them, and its components."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.cli.flags import add_flags, read_flags
from agentrl.config import Config, build_config, read_toml
from agentrl.core.seeds import derive_seed
from agentrl.errors import ConfigError
from agentrl.rollout.episode import EpisodeRunner
from agentrl.run.components import Components
from agentrl.store import IndexEntry, Recording

Run = Callable[[argparse.Namespace, list[str]], int]


def add_command(commands: Any, name: str, run: Run, about: str, *, settings: bool = True) -> argparse.ArgumentParser:
    """A command with the run it works on; with `settings`, all settings are flags that win over the run's own."""
    sub: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    sub.set_defaults(run_command=run)
    sub.add_argument(
        "recorded", type=Path, metavar="RUN", help="a run folder, a folder of episodes, or one file of them"
    )
    if settings:
        sub.add_argument(
            "--config", type=Path, metavar="FILE.toml", help="settings in place of the run's own config.toml"
        )
        add_flags(sub)
    return sub


def no_more(command: str, rest: Sequence[str]) -> None:
    """Refuse words that no flag took.

    Raises:
        ConfigError: the first of them.
    """
    if rest:
        raise ConfigError(f"{command}: unexpected {rest[0]!r}")


def settings_of(args: argparse.Namespace, rest: Sequence[str]) -> Config:
    """The settings the episodes were made with, and today's flags over them.

    Raises:
        ConfigError: they are nowhere.
    """
    path: Path = args.recorded
    near = [path / "config.toml", path.parent / "config.toml", path.parent.parent / "config.toml"]
    found = args.config or next((p for p in near if p.exists()), None)
    if found is None:
        raise ConfigError(
            f"{path}: no config.toml of a run in or above it; say with --config FILE.toml how its episodes were made"
        )
    return build_config(read_toml(found), read_flags(args, rest))


def runner_of(components: Components, split: str, engine: Any = None) -> EpisodeRunner:
    """A runner with the seed and the temperature of a split ('train', 'eval/NAME')."""
    config = components.config
    kind, _, name = split.partition("/")
    if kind == "eval":
        return components.runner(
            engine, temperature=config.eval.eval_temperature, seed=derive_seed(config.run.seed, "eval", name)
        )
    return components.runner(engine, temperature=config.rollout.rollout_temperature, seed=config.run.seed)


def chosen(recording: Recording, ids: Sequence[str]) -> list[IndexEntry]:
    """The entries of these episodes; all, if none is named."""
    return [recording.entry(i) for i in ids] if ids else recording.episodes


def say_note(recording: Recording, left: str = "") -> bool:
    """Say that the run is being written, or how many records were left out because they are not whole.

    Returns whether the run is being written: then its folder is left alone. `left`: the file in it that would have been written.
    """
    if recording.note:
        print(f"{recording.note}; {left} is left as it was" if recording.being_written and left else recording.note)
    return recording.being_written
