"""From the command line to a `Config`: for a new run, and for one that is recorded."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.cli.flags import read_flags
from agentrl.config import Config, Layer, build_config, read_toml
from agentrl.config.paths import anchor
from agentrl.engine.sglang.installation import gpus
from agentrl.env import make_env_class
from agentrl.errors import ConfigError
from agentrl.run.model_folder import embedded


def resolve(args: argparse.Namespace, rest: Sequence[str]) -> Config:
    """The settings of a new run. Later layers win: defaults, the environment's own TOML, --config, flags."""
    flags = read_flags(args, rest)
    file: Layer = read_toml(args.config) if args.config else {}
    env = str(flags.get("env", file.get("env", Config().env.env)))
    config = anchor(build_config(file, flags, base=env_defaults(env)), embedded=embedded())
    if config.run.date:
        return config
    return replace(config, run=replace(config.run, date=datetime.date.today().isoformat()))


def resolve_recorded(args: argparse.Namespace, rest: Sequence[str]) -> Config:
    """The settings with which the episodes at `args.recorded` were made, overridden by flags.

    Raises:
        ConfigError: There is no config.toml.
    """
    path = args.config or recorded_config(args.recorded)
    if path is None:
        raise ConfigError(
            f"{args.recorded}: no config.toml of a run in this folder or above it; "
            "give --config FILE.toml with the settings of its episodes"
        )
    return build_config(read_flags(args, rest), base=read_toml(path))


def recorded_config(recorded: Path) -> Path | None:
    """The config.toml of the run that a run folder, a folder of episodes or a file of them belongs to."""
    folders = (recorded, recorded.parent, recorded.parent.parent)
    return next((folder / "config.toml" for folder in folders if (folder / "config.toml").exists()), None)


def env_defaults(env: str) -> Layer:
    """Recommended settings of an environment, from `NAME.toml` beside its `NAME.py`.

    The number of trainer ranks is limited to the GPUs of this machine, if it has any.
    """
    source = sys.modules[make_env_class(env).__module__].__file__
    beside = Path(source).with_suffix(".toml") if source else None
    if not beside or not beside.exists():
        return {}
    layer = read_toml(beside)
    ranks = layer.get("actor_num_gpus_per_node", 1)
    if isinstance(ranks, int) and ranks > 1 and (cards := len(gpus())):
        layer["actor_num_gpus_per_node"] = min(ranks, cards)
    return layer
