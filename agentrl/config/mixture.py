"""Several environments in one run (`--env a=0.7 b=0.3`): the settings of each, and its share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.load import build_config
from agentrl.config.settings import FIELDS, Config
from agentrl.core.name_syntax import split_envs
from agentrl.errors import ConfigError, suggest

OWN_SETTINGS = frozenset(
    "env_args reward reward_key action_format context_policy context_policy_args max_turns max_invalid_actions max_calls_per_turn "
    "prompt_data input_key label_key data_limit eval_prompt_data eval_limit players eval_players rollout_max_response_len max_tokens_per_turn "
    "episode_timeout_s concurrency".split()
)
"""settings that an environment may have for itself"""
_NOT_SHARED = (
    "env_args",
    "context_policy_args",
    "players",
    "eval_players",
    "prompt_data",
    "eval_prompt_data",
    "input_key",
    "label_key",
)
"""settings that mean something else in each environment"""

_ONE_ONLY = ("custom_generate_function_path", "rollout_function_path")
"""functions that take the place of the environment"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvShare:
    """One of several environments."""

    name: str
    share: float
    """of the groups of a rollout; the shares sum to 1"""
    config: Config
    """all settings, as if it were the only environment"""
    concurrency: int | None
    """maximum concurrent episodes of this environment; None: not set"""


def env_shares(config: Config) -> list[EnvShare]:
    """The environments of a run that has several; [] if it has one.

    Raises:
        ConfigError: a setting is of none of them, or cannot differ between them.
    """
    envs = split_envs(config.env.env or "")
    if len(envs) == 1:
        if config.env.env_settings:
            raise ConfigError("--env-setting needs several environments, as in --env a=0.7 b=0.3")
        return []
    names = [name for name, _ in envs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--env names {repeated[0]} twice; give it once, with the sum of the shares")
    total = sum(weight for _, weight in envs)
    if not all(weight > 0 for _, weight in envs):
        raise ConfigError(f"--env {config.env.env}: every share must be above 0; leave the others out")
    for name in _NOT_SHARED:
        if getattr(getattr(config, FIELDS[name]), name):
            flag = name.replace("_", "-").removesuffix("s")
            raise ConfigError(
                f"--{flag} does not say which of the environments it is for; give --env-setting ENV.{name}=VALUE"
            )
    for name in _ONE_ONLY:
        if getattr(getattr(config, FIELDS[name]), name):
            raise ConfigError(
                f"--{name.replace('_', '-')} plays a run of one environment; leave it out, or give one --env"
            )
    settings = _own_settings(config, names)
    return [_share(config, name, weight / total, settings[name]) for name, weight in envs]


def _own_settings(config: Config, names: list[str]) -> dict[str, dict[str, Any]]:
    """The settings of `--env-setting` by environment."""
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in config.env.env_settings.items():
        env, _, setting = key.rpartition(".")
        if env not in own:
            raise ConfigError(f"--env-setting {key}: there is no environment {env!r}{suggest(env, names)}")
        if setting not in OWN_SETTINGS:
            raise ConfigError(
                f"--env-setting {key}: an environment cannot have its own {setting!r}{suggest(setting, OWN_SETTINGS)}"
            )
        own[env][setting] = value
    return own


def _share(config: Config, name: str, share: float, own: dict[str, Any]) -> EnvShare:
    concurrency = own.pop("concurrency", None)
    layer = {field: getattr(getattr(config, section), field) for field, section in FIELDS.items()}
    layer |= {"env": name, "env_settings": {}, "megatron": config.megatron, "sglang": config.sglang}
    built = build_config(own, base=layer)
    return EnvShare(name=name, share=share, config=replace(built), concurrency=concurrency)
